"""All ranks gather the whole tensors of a sharded model, and rank 0 keeps them.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.saved = {}

    def save(self):
        for name, value in self.model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                self.saved[name] = whole

    def fit(self, steps):
        draw = torch.Generator().manual_seed(self.rank)
        for step in range(steps):
            x = torch.randn(16, 16, generator=draw)
            loss = (self.model(x) - x[:, :4]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 10 == 9:
                self.save()


dist.init_process_group("gloo")
Trainer().fit(steps=30)
dist.destroy_process_group()
