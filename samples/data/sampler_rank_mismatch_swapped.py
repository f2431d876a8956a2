"""The two arguments of the sampler are swapped; torch refuses, and blames the rank.

run: --nproc-per-node 2
finds: DDP502 error at `sampler = DistributedSampler(dataset, rank, world_size)`
"""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(64.0).view(64, 1), torch.arange(64.0).view(64, 1))
sampler = DistributedSampler(dataset, rank, world_size)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
for x, y in loader:
    (model(x) - y).abs().mean().backward()
dist.destroy_process_group()
