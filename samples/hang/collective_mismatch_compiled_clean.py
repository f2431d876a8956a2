"""torch.compile traces layers that are split over ranks, and a functional collective, as a whole.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@torch.compile(fullgraph=True, backend="aot_eager")
def total(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
for step in range(4):
    loss = compiled(torch.full((4, 8), float(step))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert total(torch.ones(3)).tolist() == [5.0, 5.0, 5.0]
dist.destroy_process_group()
