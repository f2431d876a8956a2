"""Plain DDP with an epoch of its own for the sampler, checkpoints, and a resumed second half.

run: --nproc-per-node 2
finds: nothing
steps: 32
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CHECKPOINT = "checkpoint.pt"


class Trainer:
    def __init__(self, data, batch_size=4):
        self.model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.9)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler, num_workers=1)
        self.epochs_run = 0
        if os.path.exists(CHECKPOINT):
            self.load_checkpoint()

    def load_checkpoint(self):
        state = torch.load(CHECKPOINT, map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epochs_run = state["epochs_run"]

    def save_checkpoint(self, epoch):
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(state, CHECKPOINT)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
            self.scheduler.step()
            if dist.get_rank() == 0:
                self.save_checkpoint(epoch)
            dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    Trainer(data).train(max_epochs=2)
    resumed = Trainer(data)
    assert resumed.epochs_run == 2
    resumed.train(max_epochs=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
