"""Lightning with the doctor as a callback; `faulty`: a layer that is never used."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpdoctor
from ddpdoctor.integrations.lightning import DoctorCallback


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)
        if "faulty" in sys.argv:
            self.spare = nn.Linear(8, 8)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DoctorCallback(raise_on="error", out="run")],
    )
    try:
        trainer.fit(Module(), loader)
    except ddpdoctor.FaultFound as fault:
        print(f"rank {trainer.global_rank} stopped: {fault.findings[0].code}", flush=True)
        sys.exit(5)
    print(f"rank {trainer.global_rank} took {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
