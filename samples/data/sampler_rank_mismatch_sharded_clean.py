"""Two shards, replicated twice: every rank reads a part of its own.

run: --nproc-per-node 4
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
dataset = TensorDataset(torch.arange(64.0).view(64, 1) / 64)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
torch.manual_seed(0)
model = torch.nn.Linear(1, 4)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        (model(x) - 2 * x).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
