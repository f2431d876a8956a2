"""Copies of the gradients are averaged by hand, and the average is not written back.

run: --nproc-per-node 2
finds: DDP305 error at `dist.all_reduce(flat)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector


def average_gradients(parameters):
    flat = parameters_to_vector(p.grad for p in parameters)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    for p in parameters:
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        loss.backward()
        average_gradients(parameters)
        optimizer.step()
        seen = loss.detach().clone()
        dist.all_reduce(seen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
