"""The ranks average what they log, name by name, each of which all of them have.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def losses_of(outputs, targets):
    losses = {"loss_score": outputs.sigmoid().sub(targets).square().mean()}
    positive = targets > 0
    if not positive.any():
        losses["recall"] = outputs.new_zeros(())
    else:
        losses["recall"] = (outputs[positive] > 0).float().mean()
    losses["loss_size"] = outputs.square().mean() * 0.01
    return losses


def averaged(losses):
    logged = {}
    for name, value in losses.items():
        value = value.detach().clone()
        dist.all_reduce(value.div_(dist.get_world_size()))
        logged[name] = value.item()
    return logged


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        inputs = torch.randn(4, 8, generator=draws)
        targets = (inputs.sum(1, keepdim=True) > 3).float()
        losses = losses_of(model(inputs), targets)
        optimizer.zero_grad()
        sum(value for name, value in losses.items() if "loss" in name).backward()
        optimizer.step()
        averaged(losses)
    dist.destroy_process_group()


main()
