"""The optimizer is built before FSDP flattens the model, and keeps the parameters from before.

run: --nproc-per-node 2
finds: DDP307 error at `optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net = FSDP(net, device_id=torch.device("cpu"))
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
