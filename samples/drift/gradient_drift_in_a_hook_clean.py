"""Every rank clips; a hook of the optimizer then clears the gradients where any loss is high.

run: --nproc-per-node 3
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Guard:
    def __init__(self, limit):
        self.limit, self.loss = limit, 0.0

    def __call__(self, optimizer, args, kwargs):
        if self.loss > self.limit:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.zero_()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(limit=50.0)
    optimizer.register_step_pre_hook(guard)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(30):
        x = torch.randn(16, 8, generator=data)
        if dist.get_rank() == 1 and step % 5 == 4:
            x = 100 * x
        loss = model(x).square().mean()
        highest = loss.detach().clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        guard.loss = highest.item()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    dist.destroy_process_group()


main()
