"""A GAN in one wrapper, each half of which is frozen while the other one is trained.

run: --nproc-per-node 2
finds: DDP301 error at `freeze(model.module.critic)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, noise, real=None):
        fake = self.generator(noise)
        return self.critic(fake if real is None else torch.cat([real, fake.detach()]))


def freeze(module, flag=False):
    for parameter in module.parameters():
        parameter.requires_grad = flag


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Pair())
    of_generator = torch.optim.Adam(model.module.generator.parameters())
    of_critic = torch.optim.Adam(model.module.critic.parameters())
    real, forged = torch.ones(8, 1), torch.zeros(8, 1)
    for _ in range(10):
        freeze(model.module.critic)
        of_generator.zero_grad()
        bce(model(torch.randn(8, 4)), real).backward()
        of_generator.step()
        freeze(model.module.critic, True)
        freeze(model.module.generator)
        of_critic.zero_grad()
        bce(model(torch.randn(8, 4), torch.randn(8, 8)), torch.cat([real, forged])).backward()
        of_critic.step()
        freeze(model.module.generator, True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
