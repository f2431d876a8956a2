"""The generator is called around its wrapper; the discriminator of the same backward is not.

run: --nproc-per-node 2
finds: DDP304 error at `made = generator.module(torch.randn(8, 4))`
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
    for _ in range(6):
        made = generator.module(torch.randn(8, 4))
        judging.zero_grad()
        critic(torch.cat([torch.randn(8, 4), made.detach()])).square().mean().backward()
        judging.step()
        making.zero_grad()
        (1 - critic(made)).square().mean().backward()
        making.step()
    dist.destroy_process_group()
