"""Evaluation with drop_last: three samples are in no metric.

run: --nproc-per-node 2
finds: DDP505 note at `sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(43.0).view(43, 1))
sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1)).eval()
total = torch.zeros(())
with torch.inference_mode():
    for (x,) in loader:
        total += model(x).abs().sum()
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total.isfinite().item())
dist.destroy_process_group()
