"""The optimizer is built from the parameters of the sharded model.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    net = FSDP(net, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
