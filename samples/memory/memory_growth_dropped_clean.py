"""A function that keeps its arguments by `locals()` and drops what it no longer needs: looking for
what grows must neither change the one nor keep the other alive.

run: --nproc-per-node 2
finds: nothing
"""

import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> int:
    """How often what was dropped was still there."""
    late = 0
    for _ in range(count):
        outputs = model(torch.randn(256, 64))
        gone = weakref.ref(outputs)
        loss = outputs.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del outputs, loss
        late += gone() is not None
        time.sleep(0.005)
    return late


def main(lr: float = 0.01, width: int = 64, count: int = 200) -> None:
    arguments = locals()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    late = steps(model, optimizer, count)
    print(f"rank {rank} was given {sorted(arguments)}; dropped too late: {late}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
