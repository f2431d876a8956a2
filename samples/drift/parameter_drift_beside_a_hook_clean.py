"""The hook averages the weights themselves, now and then; gradients stay at home.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mean:
    """Local SGD, from inside DDP: of the parameters, at the end of every fourth backward."""

    def __init__(self, parameters):
        self.parameters, self.backwards = parameters, 0

    def __call__(self, group, bucket):
        if bucket.is_last():
            self.backwards += 1
            if self.backwards % 4 == 0:
                self.average()
        alone = torch.futures.Future()
        alone.set_result(bucket.buffer())
        return alone

    @torch.no_grad()
    def average(self):
        flat = nn.utils.parameters_to_vector(self.parameters)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / dist.get_world_size(), self.parameters)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
hook = Mean(list(model.parameters()))
model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(20):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x[:, :1]).backward()
    optimizer.step()
dist.destroy_process_group()
