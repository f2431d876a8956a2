"""BatchNorm statistics are averaged over the ranks at the end of each epoch, before they are used.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def average(model):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    followed = {name: value.clone() for name, value in net.state_dict().items()}
    for epoch in range(3):
        for _ in range(6):
            x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name, value in net.state_dict().items():
                if value.is_floating_point():
                    followed[name].lerp_(value, 0.1)
        average(net)
        if rank == 0:
            path = os.path.join(tempfile.gettempdir(), f"averaged-{os.getpid()}.pt")
            torch.save({"epoch": epoch, "model": net.state_dict()}, path)
            os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
