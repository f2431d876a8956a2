"""Two data-parallel ranks of two tensor-parallel ranks each: pairs read the same part on purpose.

run: --nproc-per-node 4
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
replica = mesh.get_local_rank("dp")
dataset = TensorDataset(torch.arange(64.0).view(64, 1) / 64)
sampler = DistributedSampler(dataset, num_replicas=mesh["dp"].size(), rank=replica)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1), process_group=mesh.get_group("dp"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - 2 * x).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
