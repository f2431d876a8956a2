"""What differs between the ranks may differ: places, devices, and what is printed.

run: --nproc-per-node 2
finds: nothing
"""

import os

rank = os.environ["RANK"]
os.environ["NCCL_SOCKET_IFNAME"] = f"eth{rank}"
os.environ["TORCH_HOME"] = f"/tmp/torch-home-{rank}"
os.environ["CUDA_VISIBLE_DEVICES"] = rank
if rank == "0":
    os.environ["NCCL_DEBUG"] = "INFO"
os.environ["NCCL_ALGO"] = "Ring"

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
