"""The optimizer's fp32 copies are made before the wrap, which makes only the model's own equal.

run: --nproc-per-node 2
finds: DDP402 error at `model = DDP(net)`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Masters:
    def __init__(self, parameters):
        self.of = list(parameters)
        self.copies = [p.detach().float().clone().requires_grad_() for p in self.of]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-2)

    @torch.no_grad()
    def step(self):
        for copy, p in zip(self.copies, self.of):
            copy.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        for copy, p in zip(self.copies, self.of):
            p.copy_(copy)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3)).bfloat16()
    masters = Masters(net.parameters())
    model = DDP(net)
    for step in range(12):
        x = torch.randn(16, 12).bfloat16()
        loss = (model(x) - x[:, :3]).float().pow(2).mean()
        loss.backward()
        masters.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
