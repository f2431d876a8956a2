"""DDP over pairs of tensor-parallel ranks, whose sampler divides the data over all four ranks.

run: --nproc-per-node 4
finds: DDP502 error at `sampler = DistributedSampler(dataset)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Classifier(), mesh["tp"], plan)
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    x = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
