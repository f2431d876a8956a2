"""`FullyShardedDataParallel`, clipped by the norm of all shards.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main(updates=12):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(updates):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        nn.functional.cross_entropy(model(x), y).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
