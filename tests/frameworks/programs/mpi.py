"""Two ranks that mpirun started, and that read who they are from its variables.

run: exec -- mpirun -np 2 --oversubscribe --allow-run-as-root python {}
finds: nothing
steps: 8
needs: mpirun
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=size
)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(rank)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
