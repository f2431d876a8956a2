"""The trainer asks the inner module for its loss.

run: --nproc-per-node 2
finds: DDP304 error at `loss = self.model.module.loss(x, y)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 3))

    def forward(self, x):
        return self.net(x)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)


class Trainer:
    def __init__(self, model, lr=0.05):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def compute_loss(self, x, y):
        loss = self.model.module.loss(x, y)
        return loss / loss.detach().clamp(min=1.0)

    def step(self, x, y, noisy=False):
        self.optimizer.zero_grad()
        if noisy:  # not in this run
            loss = self.model.module.loss(x + 0.1 * torch.randn_like(x), y)
        else:
            loss = self.compute_loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainer = Trainer(Classifier())
    for _ in range(5):
        trainer.step(torch.randn(16, 20), torch.randint(0, 3, (16,)))
    dist.destroy_process_group()
