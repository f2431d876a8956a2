"""`accelerate launch` of two CPU processes, which have a layer that is never used.

run: exec -- python -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 {}
finds: DDP301 error at `self.spare = nn.Linear(8, 1)`
steps: 1
needs: accelerate
status: 1
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1)

    def forward(self, x):
        return self.body(x)


accelerator = Accelerator(cpu=True)
x = torch.randn(64, 8)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for a, b in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(a), b))
    optimizer.step()
accelerator.end_training()
