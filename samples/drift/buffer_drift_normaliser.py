"""Each rank normalises by the statistics of its own observations, and rank 0 saves its own.

run: --nproc-per-node 2
finds: DDP403 warning at `self.norm = Normaliser(6)`
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn


class Normaliser(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def update(self, x):
        self.mean.lerp_(x.mean(0), 0.05)

    def forward(self, x):
        return x - self.mean


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Normaliser(6)
        self.actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        return self.actor(self.norm(x))


def average(model):
    gradients = [p.grad.view(-1) for p in model.parameters()]
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(40):
        seen = torch.randn(32, 6) + 2.0
        policy.norm.update(seen)
        loss = policy(seen).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        average(policy)
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(policy.state_dict(), os.path.join(tempfile.mkdtemp(), "policy.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
