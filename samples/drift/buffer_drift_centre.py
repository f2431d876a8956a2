"""The centre of a loss follows each rank's own outputs, and rank 0 saves its centre.

run: --nproc-per-node 2
finds: DDP403 warning at `criterion = CentredLoss(8)`
"""

import io

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class CentredLoss(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("centre", torch.zeros(size))

    def forward(self, output, wanted):
        loss = F.mse_loss(output - self.centre, wanted)
        mean = output.detach().mean(0)
        self.centre = 0.9 * self.centre + 0.1 * mean
        return loss


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    criterion = CentredLoss(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(30):
        loss = criterion(model(torch.randn(32, 16)), torch.randn(32, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"loss": criterion.state_dict()}, io.BytesIO())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
