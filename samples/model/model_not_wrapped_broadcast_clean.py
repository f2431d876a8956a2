"""Local SGD: equal weights to begin with, and averaged after many steps, the last time at the end.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 4)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(50):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            for parameter in model.parameters():
                with torch.no_grad():
                    dist.all_reduce(parameter.div_(2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
