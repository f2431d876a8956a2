"""Hugging Face Accelerate with a prepared scheduler that is stepped once per epoch.

run: --nproc-per-node 2
finds: DDP413 warning at `sched.step()`
steps: 32
needs: accelerate
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    acc = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.1)
    data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, opt, loader, sched = acc.prepare(model, opt, loader, sched)
    for epoch in range(8):
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            acc.backward(loss)
            opt.step()
        sched.step()
        acc.print(epoch, sched.get_last_lr())
    acc.end_training()


main()
