"""The model is frozen between its phases, also while its optimizer steps; gradients are cleared.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        model.requires_grad_(True)
        loss = (model(torch.randn(8, 4)) - torch.randn(8, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.requires_grad_(False)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
