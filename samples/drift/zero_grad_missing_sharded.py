"""The loop never clears the gradients of a model whose parameters are sharded by FSDP2.

run: --nproc-per-node 2
finds: DDP411 warning at `optimizer.step()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(updates=10):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(updates):
        x, y = torch.randn(8, 16), torch.randn(8, 8)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
