"""A GAN: the discriminator is frozen for the generator's steps and thawed before its own.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP


class Adversaries:
    def __init__(self):
        self.generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
        self.critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3)

    def judge(self, real):
        self.critic.requires_grad_(True)
        with torch.no_grad():
            fake = self.generator(torch.randn(8, 4))
        wanted = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
        self.of_critic.zero_grad()
        bce(self.critic(torch.cat([real, fake])), wanted).backward()
        self.of_critic.step()

    def forge(self):
        self.critic.requires_grad_(False)
        self.of_generator.zero_grad()
        bce(self.critic(self.generator(torch.randn(8, 4))), torch.ones(8, 1)).backward()
        self.of_generator.step()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
both = Adversaries()
for turn in range(220):
    both.judge(torch.randn(8, 8) + 2)
    if turn % 3 == 0:
        both.forge()
dist.destroy_process_group()
