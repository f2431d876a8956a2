"""A GAN: each loss leaves gradients in the other network, which are cleared before they are used;
the generator's are set to None by hand, the discriminator's are zeroed through `.data`.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

bce = nn.BCEWithLogitsLoss()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    for_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    for _ in range(8):
        real, fake = torch.randn(16, 8), generator(torch.randn(16, 4))

        for parameter in critic.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        scores = critic(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(16, 1), torch.zeros(16, 1)])
        bce(scores, truth).backward()
        for_critic.step()

        for parameter in generator.parameters():
            parameter.grad = None
        bce(critic(fake), torch.ones(16, 1)).backward()
        for_generator.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
