"""A list of tensors for `all_gather`; one tensor several times, where nothing reads the results.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def of_all_ranks(mine):
    rewards = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rewards, mine)
    return torch.cat(rewards)


def warm_up():
    unused = [torch.zeros(1024)] * dist.get_world_size()
    dist.all_gather(unused, torch.ones(1024))


def main():
    dist.init_process_group("gloo")
    warm_up()
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
