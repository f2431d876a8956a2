"""An auxiliary head whose output the loss only takes in from some step on: the search is needed.

run: --nproc-per-node 2
finds: DDP301 note at `self.depth = nn.Linear(32, 1)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WARM_UP = 8


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.label = nn.Linear(32, 1)
        self.depth = nn.Linear(32, 1)

    def forward(self, x):
        x = self.body(x)
        return {"label": self.label(x), "depth": self.depth(x)}


def main():
    dist.init_process_group("gloo")
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for step in range(24):
        x = torch.randn(32, 10)
        out = model(x)
        loss = nn.functional.mse_loss(out["label"], x.sum(1, keepdim=True))
        if step >= WARM_UP:
            loss = loss + nn.functional.l1_loss(out["depth"], x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
