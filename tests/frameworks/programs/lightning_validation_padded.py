"""Lightning divides 21 samples of a validation by a sampler that pads, and 22 results are scored.

run: --nproc-per-node 2
finds: DDP504 warning at `everyone = self.all_gather(torch.cat(self.seen))`
steps: 16
needs: lightning
"""

import lightning as L
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.seen = []

    def training_step(self, batch, _):
        x, y = batch
        return functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.seen.append((self.layer(x).argmax(1) == y).float())

    def on_validation_epoch_end(self):
        everyone = self.all_gather(torch.cat(self.seen))
        self.seen.clear()
        self.log("accuracy", everyone.mean(), rank_zero_only=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def data(count):
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 2, (count,)))


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    train, test = DataLoader(data(128), 8, shuffle=True), DataLoader(data(21), 4)
    trainer.fit(Classifier(), train, test)
