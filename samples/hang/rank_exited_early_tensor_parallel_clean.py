"""Two ranks split the layers, and take the same batches.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
draw = torch.Generator().manual_seed(2)
batches = [torch.randn(16, 16, generator=draw) for _ in range(40)]
for x in batches:
    loss = F.mse_loss(model(x), x[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
