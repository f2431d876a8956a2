"""A run is resumed from the state of the model; `strict=False` is for a head that is new.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def make():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    first = DDP(make())
    train(first, 10)
    state = {n: v for n, v in first.module.state_dict().items() if not n.startswith("2.")}
    model = make()
    model.load_state_dict(state, strict=False)
    train(DDP(model), 10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
