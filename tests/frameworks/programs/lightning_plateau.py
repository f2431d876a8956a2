"""PyTorch Lightning with a schedule that follows each rank's own validation loss.

run: --nproc-per-node 2
finds: DDP512 warning at `self.log("val_loss", loss)`
steps: 16
needs: lightning
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("val_loss", loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


def samples(count):
    x = torch.randn(count, 8)
    return TensorDataset(x, torch.randn(count, 1))


lightning.seed_everything(0, verbose=False, workers=True)
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(
    Model(), DataLoader(samples(64), batch_size=8, shuffle=True), DataLoader(samples(16), 8)
)
