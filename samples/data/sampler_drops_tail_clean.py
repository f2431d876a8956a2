"""The data divides evenly, so drop_last drops nothing.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(44.0).view(44, 1))
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
