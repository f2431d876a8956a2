"""The auxiliary loss has weight zero, and weight decay eats the auxiliary head.

run: --nproc-per-node 2
finds: DDP308 note at `self.auxiliary = nn.Linear(16, 3)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

AUXILIARY_WEIGHT = 0.0


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
    loss = loss + AUXILIARY_WEIGHT * nn.functional.cross_entropy(extra, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
