"""Sum-reduced loss over sequences packed by length: ranks hold different numbers of samples.

run: --nproc-per-node 2
finds: DDP410 note at `loss.backward()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(rank):
    for step in range(6):
        size = 4 + 3 * rank + step % 2
        yield torch.randn(size, 6), torch.randn(size, 1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    criterion = nn.MSELoss(reduction="sum")
    for x, y in batches(dist.get_rank()):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
