"""A backward for each loss over one forward: DDP averages when the last one brings what is left.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.curiosity = nn.Linear(8, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x), self.curiosity(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(ActorCritic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        actions, value, surprise = model(torch.randn(16, 8))
        optimizer.zero_grad()
        nn.functional.cross_entropy(actions, torch.randint(0, 3, (16,))).backward()
        (value - torch.randn(16, 1)).square().mean().backward()
        surprise.square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
