"""Hugging Face Accelerate, which divides the shares of a DistributedSampler once more.

run: --nproc-per-node 2
finds: DDP505 warning at `sampler = DistributedSampler(data, *places)`
steps: 8
needs: accelerate
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

accelerator = Accelerator(cpu=True)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
places = accelerator.num_processes, accelerator.process_index
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data, *places)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        accelerator.backward(nn.functional.mse_loss(model(a), b))
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
