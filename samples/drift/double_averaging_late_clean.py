"""From step 150 on two micro-batches are accumulated, each divided by their number.

run: --nproc-per-node 2
finds: nothing
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shown = torch.zeros(1)
    for step in range(260):
        micro_batches = 1 if step < 150 else 2
        optimizer.zero_grad()
        for part in range(micro_batches):
            last = part == micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(torch.randn(8, 8)).square().mean()
                (loss / micro_batches).backward()
        optimizer.step()
        if step >= 150:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            shown /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(shown.item())
    dist.destroy_process_group()


main()
