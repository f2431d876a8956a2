"""The same GAN with a wrapper around each half: a frozen half's wrapper awaits no gradient.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP


def freeze(module, flag=False):
    for parameter in module.parameters():
        parameter.requires_grad = flag


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    real, forged = torch.ones(8, 1), torch.zeros(8, 1)
    for _ in range(10):
        freeze(critic)
        of_generator.zero_grad()
        bce(critic(generator(torch.randn(8, 4))), real).backward()
        of_generator.step()
        freeze(critic, True)
        with torch.no_grad():
            fake = generator(torch.randn(8, 4))
        of_critic.zero_grad()
        bce(critic(torch.cat([torch.randn(8, 8), fake])), torch.cat([real, forged])).backward()
        of_critic.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
