"""Accelerate with the doctor as a tracker; `faulty`: a layer that is never used."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpdoctor.integrations.accelerate import DoctorTracker


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)
        if "faulty" in sys.argv:
            self.spare = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)


accelerator = Accelerator(cpu=True, log_with=DoctorTracker(out="run"))
accelerator.init_trackers("project", config={"lr": 0.01})
x = torch.randn(128, 8)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        steps += 1
        accelerator.log({"loss": loss.item()}, step=steps)
print(f"rank {accelerator.process_index} took {steps} steps", flush=True)
accelerator.end_training()
