"""A language model whose weights are tied once more, after it was wrapped.

run: --nproc-per-node 2
finds: DDP306 error at `self.head.weight = self.embedding.weight`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)

    def tie_weights(self):
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def main():
    dist.init_process_group("gloo")
    model = DDP(Language())
    model.module.tie_weights()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        ids = torch.randint(0, 20, (4, 7))
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
