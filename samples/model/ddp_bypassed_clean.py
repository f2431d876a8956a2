"""The inner module serves evaluation, weight decay, an EMA copy and saving; training calls DDP.

run: --nproc-per-node 2
finds: nothing
"""

import copy
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 3))

    def forward(self, x, y=None):
        logits = self.net(x)
        return logits if y is None else F.cross_entropy(logits, y)


@torch.no_grad()
def accuracy(net, x, y):
    net.eval()
    hits = (net(x).argmax(1) == y).float().mean()
    net.train()
    return hits


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Classifier())
    ema = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        x, y = torch.randn(16, 20), torch.randint(0, 3, (16,))
        loss = model(x, y) + 1e-4 * sum(p.square().sum() for p in model.module.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(ema.parameters(), model.module.parameters()):
                kept.lerp_(new, 0.1)
        if step % 3 == 0:
            accuracy(model.module, x, y)
            # Which inputs matter? The gradients are cleared before the next step.
            probe = x.clone().requires_grad_()
            model.module(probe, y).backward()
            model.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), io.BytesIO())
    dist.destroy_process_group()
