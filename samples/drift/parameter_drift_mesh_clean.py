"""Two data-parallel ranks of two tensor-parallel ranks each, whose gradients are averaged by hand.

run: --nproc-per-node 4
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def average(model, mesh):
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        dist.all_reduce(gradient, group=mesh.get_group())
        gradient /= mesh.size()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model = Classifier()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(model, mesh["tp"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(40):
        x = torch.randn(16, 16, generator=draw)
        loss = F.cross_entropy(model(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        average(model, mesh["dp"])
        optimizer.step()
    dist.destroy_process_group()


main()
