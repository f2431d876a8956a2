"""The auxiliary loss warms up: its weight is zero in the first steps only.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.auxiliary = nn.Linear(16, 3)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.head(h), self.auxiliary(h)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
for step in range(17):
    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
    out, extra = model(x)
    loss = nn.functional.cross_entropy(out, y)
    loss = loss + min(1.0, max(0, step - 2) / 10) * nn.functional.cross_entropy(extra, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
