"""A sharded model is resumed with the optimizer state that rank 0 has saved for its own shards.

run: --nproc-per-node 2
finds: DDP805 error at `torch.save({"optimizer": optimizer.state_dict()}, PATH)`
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

PATH = os.path.join(tempfile.gettempdir(), "optimizer_state_drift_shards.pt")


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    model, optimizer = build()
    train(model, optimizer, 6)
    if dist.get_rank() == 0:
        torch.save({"optimizer": optimizer.state_dict()}, PATH)
    dist.barrier()
    model, optimizer = build()
    saved = torch.load(PATH, weights_only=False)
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
