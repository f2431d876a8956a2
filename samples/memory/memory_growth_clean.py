"""The losses of all steps are kept as numbers.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self):
        layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())]
        self.model = DDP(nn.Sequential(*layers, nn.Linear(64, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.history = []

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item())

    def fit(self, steps):
        for _ in range(steps):
            x = torch.randn(32, 64)
            self.step(x, x.mean(1, keepdim=True))
        return sum(self.history) / steps


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mean = Trainer().fit(400)
    if dist.get_rank() == 0:
        print(f"mean loss {mean:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
