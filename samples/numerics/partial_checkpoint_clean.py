"""All ranks collect the whole state, and rank 0 saves it.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(model, optimizer, path):
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
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
