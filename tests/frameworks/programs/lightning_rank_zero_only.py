"""PyTorch Lightning, where a hook that runs on rank 0 only asks for a property that broadcasts.

run: --nproc-per-node 2
finds: DDP601 error at `print(self.trainer.log_dir)`
steps: 0
needs: lightning
status: 4
"""

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    @rank_zero_only
    def on_fit_start(self):
        print(self.trainer.log_dir)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8))
