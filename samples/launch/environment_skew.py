"""One rank is set up with another NCCL and OpenMP configuration than the others.

run: --nproc-per-node 2
finds: DDP103 warning at `os.environ["NCCL_ALGO"] = "Tree"`
"""

import os

if os.environ["RANK"] == "1":  # left over from debugging on the second machine
    os.environ["NCCL_ALGO"] = "Tree"
    os.environ["OMP_NUM_THREADS"] = "2"

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
