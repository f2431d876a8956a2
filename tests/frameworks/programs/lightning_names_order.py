"""PyTorch Lightning, where ranks log the losses of the same classes in another order.

run: --nproc-per-node 2
finds: DDP601 error at `self.log_dict(losses, on_step=False, on_epoch=True, sync_dist=True)`
steps: 8
needs: lightning
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        classes = ("bus", "car") if self.global_rank else ("car", "bus")
        losses = {name: loss.detach() for name in classes}
        self.log_dict(losses, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


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
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8))
