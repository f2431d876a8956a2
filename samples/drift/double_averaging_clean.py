"""Two ranks, and every other two: accumulation over two micro-batches, the mean of two losses, a
loss averaged for the log, and gradients averaged by hand where DDP was told not to.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= size


def main(accumulation=2):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)))
    other = DDP(nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        for micro in range(accumulation):
            model.require_backward_grad_sync = micro + 1 == accumulation
            a, b = torch.randn(16, 10), torch.randn(16, 10)
            loss = (nn.functional.mse_loss(model(a), b) + nn.functional.l1_loss(a, b)) / 2
            loss = loss / accumulation
            loss.backward()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        shown = shown / world_size
        optimizer.step()

        other_optimizer.zero_grad()
        with other.no_sync():
            other(torch.randn(16, 10)).square().mean().backward()
        average_gradients(other)
        other_optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
