"""Hugging Face Accelerate, where the program drops the rows that fill up the last batch.

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


def samples(count):
    x = torch.randn(count, 8)
    return TensorDataset(x, (x.sum(1) > 0).long())


def evaluate(accelerator, model, loader):
    model.eval()
    right = total = 0
    for x, y in loader:
        with torch.no_grad():
            guesses = model(x).argmax(1)
        guesses, labels = accelerator.gather((guesses, y))
        if accelerator.gradient_state.end_of_dataloader:
            left = len(loader.dataset) - total
            guesses, labels = guesses[:left], labels[:left]
        right += int((guesses == labels).sum())
        total += len(labels)
    return right / total


set_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(samples(64), batch_size=8, shuffle=True)
held_out = DataLoader(samples(21), batch_size=4)
model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
for _ in range(2):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.print(evaluate(accelerator, model, held_out))
accelerator.end_training()
