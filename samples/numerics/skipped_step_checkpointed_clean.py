"""A step is skipped as its loss is not finite, in a model whose blocks are checkpointed: to look
for what went wrong must not compute them again, or BatchNorm would count the batch twice.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(12):
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        if step in (3, 7):  # as an overflow does, on every rank alike
            loss = loss * float("inf")
        optimizer.zero_grad()
        loss.backward()
        if step not in (3, 7):
            optimizer.step()
    batches = sum(int(b) for name, b in model.named_buffers() if name.endswith("tracked"))
    if dist.get_rank() == 0:
        print(f"BatchNorm saw {batches} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
