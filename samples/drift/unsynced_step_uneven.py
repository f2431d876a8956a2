"""Sharded model: each rank splits its sequences into as many micro-batches as their lengths need.

run: --nproc-per-node 2
finds: DDP407 error at `for part in split(lengths):`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

LENGTHS = [[[2, 2], [3, 3, 2], [2, 2]], [[2, 2], [2, 2], [3, 3, 2]]]
"""By rank and step, of the sequences."""


def split(lengths, limit=4):
    """Groups of sequences of at most so many elements in all."""
    count = -(-sum(lengths) // limit)
    return [lengths[first::count] for first in range(count)]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(9):
        lengths = LENGTHS[dist.get_rank()][step % 3]
        for part in split(lengths):
            x, y = torch.randn(sum(part), 16), torch.randint(8, (sum(part),))
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            (loss / sum(lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
