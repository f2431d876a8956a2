"""One of two ranks that mpirun started raises; the other waits for it.

run: exec -- mpirun -np 2 --oversubscribe --allow-run-as-root python {}
finds: DDP606 error at `label = labels[batch]`
steps: 5
needs: mpirun
status: 1
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
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labels = torch.ones(6 - rank, 4, 1)
for batch in range(6):
    label = labels[batch]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(4, 8)), label).backward()
    optimizer.step()
dist.destroy_process_group()
