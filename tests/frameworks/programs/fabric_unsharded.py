"""Lightning Fabric whose loader is not set up: every rank trains on all of the data.

run: --nproc-per-node 2
finds: DDP501 error at `train_loader = DataLoader(data, batch_size=4, shuffle=True)`
steps: 32
needs: lightning
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train_loader = DataLoader(data, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(2):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
