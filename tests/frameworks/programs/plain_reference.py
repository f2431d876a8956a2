"""A DDP model checked against a plain copy, which every rank trains on all of the data on purpose.

run: --nproc-per-node 2
finds: nothing
steps: 16
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = DDP(copy.deepcopy(reference))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler)
reference_loader = DataLoader(data, batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    for (x, y), (all_x, all_y) in zip(loader, reference_loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

        reference_optimizer.zero_grad()
        nn.functional.mse_loss(reference(all_x), all_y).backward()
        reference_optimizer.step()

        for ours, theirs in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(ours, theirs)
dist.destroy_process_group()
