"""The gradients of a model under FSDP1, which makes new views of its flat gradient in each forward,
are zeroed in place after each step.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(updates=10):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = FSDP(layers, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(updates):
        x, y = torch.randn(8, 16), torch.randn(8, 8)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
