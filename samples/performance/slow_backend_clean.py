"""NCCL for models on GPUs, gloo on the CPU.

run: --nproc-per-node 2
finds: nothing
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    local, enough = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() > 1
    device = torch.device("cuda", local) if enough else torch.device("cpu")
    if enough:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if enough else "gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(64, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.randn(16, 64, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
