"""Mixed precision overflows now and then: the scaler skips those steps on all ranks.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Attention(nn.Module):
    """Masks with -inf, which never reaches the loss."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return self.out(weights @ v)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
    for _ in range(12):
        x, y = torch.randn(4, 6, 16), torch.randint(0, 4, (4, 6))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
