"""Lightning with manual optimisation, a schedule and clipping.

run: --nproc-per-node 2
finds: nothing
steps: 8
needs: lightning
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        scheduler = self.lr_schedulers()
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        scheduler.step()
        self.log("train_loss", loss, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)]


lightning.seed_everything(0, verbose=False)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Regression(),
    DataLoader(data, batch_size=8, shuffle=True),
    DataLoader(data, batch_size=8),
)
