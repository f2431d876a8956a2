"""The same model, one process for each device.

run: --nproc-per-node 2
finds: nothing
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    local, enough = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if enough else "gloo")
    device = torch.device("cuda", local) if enough else torch.device("cpu")
    if enough:
        torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DDP(net, device_ids=[local] if enough else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        x, y = torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
