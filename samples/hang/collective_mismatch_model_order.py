"""Two wrapped models take turns in the order of each rank's own data.

run: --nproc-per-node 2
finds: DDP601 error at `loss.backward()`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(generator):
    """What two players did in a game, whoever began it."""
    names = ["red", "blue"] if torch.rand((), generator=generator) < 0.5 else ["blue", "red"]
    return {name: torch.randn(8, 6, generator=generator) for name in names}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policies = {name: DDP(torch.nn.Linear(6, 3)) for name in ("red", "blue")}
    optimizer = torch.optim.SGD([p for m in policies.values() for p in m.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(4 + dist.get_rank())
    for _ in range(12):
        optimizer.zero_grad()
        played = batches(generator)
        for name in played:
            loss = policies[name](played[name]).square().mean()
            loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
