"""Only rank 0 resumes: it begins at another step, and the ranks report at different steps.

run: --nproc-per-node 2
finds: DDP601 error at `state = torch.load(path, map_location="cpu")`
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def resume(path, model):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    return state["step"]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Linear(6, 1)
    path = os.path.join(tempfile.gettempdir(), "collective_mismatch_resumed.pt")
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": 12}, path)
    dist.barrier()
    start = 0
    if rank == 0:
        start = resume(path, model)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(start, 40):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            print(step, mean.item() / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
