"""The loop never clears the gradients.

run: --nproc-per-node 2
finds: DDP411 warning at `self.optimizer.step()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model):
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.criterion = nn.MSELoss()

    def train(self, batches):
        for inputs, targets in batches:
            loss = self.criterion(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(10)]
    Trainer(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))).train(batches)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
