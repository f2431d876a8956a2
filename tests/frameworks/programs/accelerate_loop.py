"""Hugging Face Accelerate with gradient accumulation.

run: --nproc-per-node 2
finds: nothing
steps: 8
needs: accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
x = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(a), b)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
