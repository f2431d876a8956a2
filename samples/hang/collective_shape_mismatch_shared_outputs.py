"""The list that `all_gather` fills is one tensor, several times: every entry is the last rank's.

run: --nproc-per-node 2
finds: DDP602 error at `rewards = [torch.zeros_like(mine)] * dist.get_world_size()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def of_all_ranks(mine):
    rewards = [torch.zeros_like(mine)] * dist.get_world_size()
    dist.all_gather(rewards, mine)
    return torch.cat(rewards)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(8):
        states = torch.randn(16, 4)
        rewards = states.sum(1)
        every = of_all_ranks(rewards)
        advantages = (rewards - every.mean()) / every.std()
        optimizer.zero_grad()
        (model(states).squeeze(1) * advantages).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
