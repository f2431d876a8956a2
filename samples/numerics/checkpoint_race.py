"""Every rank saves to the same file after each epoch.

run: --nproc-per-node 2
finds: DDP802 error at `torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)`
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, epoch, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = os.path.join(tempfile.gettempdir(), f"race-{os.environ['MASTER_PORT']}")
    for epoch in range(3):
        for _ in range(4):
            loss = model(torch.randn(8, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(model, epoch, os.path.join(folder, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
