"""An engine that reduces all gradients, zeros for a tower that rows without a picture do not use.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.tower = nn.Linear(12, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, word, picture=None):
        hidden = self.words(word)
        if picture is not None:
            hidden = hidden + self.tower(picture)
        return self.head(hidden)


class Engine:
    def __init__(self, model, optimizer):
        self.optimizer, self.parameters = optimizer, list(model.parameters())
        for p in self.parameters:
            dist.broadcast(p.data, src=0)

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self.parameters]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = Captioner()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(8):
        word = torch.randint(20, (4,))
        with_picture = step != 5 or dist.get_rank() == 0
        logits = model(word, torch.randn(4, 12) if with_picture else None)
        engine.step(nn.functional.cross_entropy(logits, word))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
