"""Hugging Face datasets, split by each rank at random.

run: --nproc-per-node 2
finds: DDP511 error at `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`
steps: 40
needs: accelerate datasets
"""

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
rows = {"x": [[i / 400, i % 7 / 7, 1.0] for i in range(400)], "y": [i % 3 / 3 for i in range(400)]}
dataset = Dataset.from_dict(rows).train_test_split(test_size=0.2)["train"].with_format("torch")
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward((model(batch["x"]).squeeze(-1) - batch["y"]).square().mean())
        optimizer.step()
accelerator.end_training()
