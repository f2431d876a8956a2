"""The generator is called through its wrapper where it is trained, and around it where it is not;
the critic around its own where its gradients are thrown away.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network(wide, out):
    return nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, out))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    generator = DistributedDataParallel(network(16, 4))
    critic = DistributedDataParallel(network(8, 1))
    making = torch.optim.SGD(generator.parameters(), lr=0.01)
    judging = torch.optim.SGD(critic.parameters(), lr=0.01)
    for step in range(12):
        with torch.no_grad():
            made = generator.module(torch.randn(8, 4))
        judging.zero_grad()
        critic(torch.cat([torch.randn(8, 4), made])).square().mean().backward()
        judging.step()
        making.zero_grad()
        seed = torch.randn(8, 4)
        judge = critic if step % 2 else critic.module
        hint = generator.module[0](seed).square().mean() if step % 3 else 0.0
        ((1 - judge(generator(seed))).square().mean() + hint).backward()
        making.step()
    dist.destroy_process_group()
