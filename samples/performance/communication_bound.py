"""A model of many megabytes on tiny batches: most of a step goes into averaging gradients.

run: --nproc-per-node 2
finds: DDP703 note at `model = DDP(nn.Sequential(*layers))`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(1536, 1536) for _ in range(4)]
    model = DDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(14):
        loss = model(torch.randn(2, 1536)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
