"""Two wrappers share an encoder: each averages what a backward over its own forward adds.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
    actor = DistributedDataParallel(nn.Sequential(encoder, nn.Linear(24, 3)))
    critic = DistributedDataParallel(nn.Sequential(encoder, nn.Linear(24, 1)))
    parameters = [*actor.parameters(), *critic.module[1].parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(40):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        nn.functional.cross_entropy(actor(x), x[:, :3].argmax(1)).backward()
        nn.functional.mse_loss(critic(x)[:, 0], x.sum(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
