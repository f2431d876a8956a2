"""Two models that are trained by turns, and a loop that all ranks leave in the same round.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def make_net():
    return DDP(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    critic, generator = make_net(), make_net()
    trains_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    trains_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(rank)
    for step in range(12):
        limit = 100.0 if step == 5 else 0.0
        for _ in range(3):
            loss = critic(torch.randn(8, 6, generator=draws)).square().mean()
            trains_critic.zero_grad()
            loss.backward()
            trains_critic.step()
            if loss.item() < limit:
                break
        made = generator(torch.randn(8, 6, generator=draws)).square().mean()
        trains_generator.zero_grad()
        made.backward()
        trains_generator.step()
    dist.destroy_process_group()


main()
