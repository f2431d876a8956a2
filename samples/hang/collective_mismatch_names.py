"""The ranks average the same figures, but not in the same order: the loss becomes the error.

run: --nproc-per-node 2
finds: DDP601 error at `return {name: averaged(value) for name, value in figures.items()}`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def averaged(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def over_ranks(figures):
    return {name: averaged(value) for name, value in figures.items()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(rank)
    for step in range(12):
        inputs = torch.randn(8, 6, generator=draws)
        outputs = model(inputs)
        loss = (outputs - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures = {"norm": outputs.norm()} if rank else {}
        figures |= {"loss": loss, "norm": outputs.norm()}
        told = over_ranks(figures)
        if rank == 0:
            print(step, f"{told['loss'].item():.4f}")
    dist.destroy_process_group()


main()
