"""Two shards, replicated twice: the sampler divides by the shards, and the copies read the same.

run: --nproc-per-node 4
finds: DDP502 error at `sampler = DistributedSampler(dataset, num_replicas=2, rank=shard)`
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
dataset = TensorDataset(torch.arange(64.0).view(64, 1) / 64)
shard = mesh.get_local_rank("shard")
sampler = DistributedSampler(dataset, num_replicas=2, rank=shard)
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
