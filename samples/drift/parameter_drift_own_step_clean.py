"""An optimizer of the program's own scales a layer by values of all ranks' batches.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh())
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.body(x))


class CappedSGD(torch.optim.Optimizer):
    """Scales the last layer down while the largest output exceeds a limit."""

    def __init__(self, parameters, lr, head):
        super().__init__(parameters, {"lr": lr})
        self.head = head
        self.largest = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        self.cap()

    def cap(self):
        dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        scale = (0.1 / self.largest).clamp(max=1.0)
        self.head.weight.mul_(scale)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = Net()
    model = DDP(net)
    optimizer = CappedSGD(model.parameters(), 0.01, net.head)
    for step in range(12):
        x = torch.randn(16, 12)
        out = model(x)
        optimizer.largest = out.detach().abs().max()
        optimizer.zero_grad()
        (out - x[:, :3]).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
