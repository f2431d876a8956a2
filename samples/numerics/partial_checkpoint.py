"""Rank 0 saves the `state_dict()` of a sharded model: its own shards.

run: --nproc-per-node 2
finds: DDP805 error at `torch.save({"model": weights, "optimizer": state}, path)`
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(model, optimizer, path):
    if dist.get_rank() == 0:
        weights, state = model.state_dict(), optimizer.state_dict()
        torch.save({"model": weights, "optimizer": state}, path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(20):
            x = torch.randn(16, 16, generator=generator)
            optimizer.zero_grad()
            (model(x) - x[:, :8]).square().mean().backward()
            optimizer.step()
            if step % 10 == 9:
                save(model, optimizer, os.path.join(folder, f"step-{step}.pt"))
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
