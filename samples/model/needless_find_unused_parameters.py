"""The option was copied from another project; every parameter is used in every step.

run: --nproc-per-node 2
finds: DDP303 note at `model = DDP(net, find_unused_parameters=True)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    net = nn.Sequential(
        nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        x = torch.randn(32, 10)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
