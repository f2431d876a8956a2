"""The same with the statistics of all ranks in the moving averages.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Codebook(nn.Module):
    def __init__(self, size=16, dim=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(size, dim))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(size))

    @torch.no_grad()
    def update(self, vectors, chosen):
        one_hot = F.one_hot(chosen, len(self.codes)).float()
        counts, sums = one_hot.sum(0), one_hot.T @ vectors
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.counts.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])

    def forward(self, vectors):
        chosen = torch.cdist(vectors.detach(), self.codes).argmin(1)
        quantised = self.codes[chosen]
        if self.training:
            self.update(vectors.detach(), chosen)
        return vectors + (quantised - vectors).detach()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 4), Codebook(), nn.Linear(4, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        batch = torch.randn(32, 8, generator=generator)
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
