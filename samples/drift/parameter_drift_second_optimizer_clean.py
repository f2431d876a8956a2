"""Gradients are averaged by hand: by one optimizer inside its own step, for the other before it.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


def average(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class AveragingSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            average(group["params"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(24, 8), nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False),
        nn.Linear(8, 24),
    )  # fmt: skip
    rest = [*model[0].parameters(), *model[3].parameters()]
    sgd = AveragingSGD([model[1].weight, model[2].weight], lr=0.05)
    adam = torch.optim.Adam(rest, lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randint(0, 24, (16,), generator=data)
        nn.functional.cross_entropy(model(x), x).backward()
        average(rest)
        adam.step()
        sgd.step()
        model.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
