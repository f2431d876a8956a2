"""set_epoch is never called: every epoch has the order of the first.

run: --nproc-per-node 2
finds: DDP503 warning at `self.sampler = DistributedSampler(dataset, shuffle=True)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, dataset, epochs):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sampler = DistributedSampler(dataset, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)
        self.epochs = epochs

    def step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        for epoch in range(self.epochs):
            total = sum(self.step(batch) for batch in self.loader)
            if dist.get_rank() == 0:
                print(epoch, total.item() / len(self.loader))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=g)
    Trainer(torch.nn.Linear(6, 1), TensorDataset(x, x.sum(1, keepdim=True)), epochs=3).fit()
    dist.destroy_process_group()
