"""Lightning Fabric: a loop of one's own with accumulation and a validation that is reduced.

run: --nproc-per-node 2
finds: nothing
steps: 8
needs: lightning
"""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


def main():
    seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    with fabric.init_module():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, val_loader = fabric.setup_dataloaders(
        DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
    )
    for epoch in range(2):
        model.train()
        for i, (inputs, targets) in enumerate(train_loader):
            accumulating = (i + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss / ACCUMULATE)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for inputs, targets in val_loader:
                total += nn.functional.mse_loss(model(inputs), targets)
        mean = fabric.all_reduce(total / len(val_loader), reduce_op="mean")
        fabric.print(f"epoch {epoch}: {mean.item():.4f}")
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})


if __name__ == "__main__":
    main()
