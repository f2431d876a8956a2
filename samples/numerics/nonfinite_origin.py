"""On one rank a batch holds only masked tokens: the mean over none of them is NaN.

run: --nproc-per-node 2
finds: DDP801 error at `return (per_token * mask).sum() / mask.sum()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens, tags, mask):
        logits = self.head(self.embed(tokens))
        per_token = nn.functional.cross_entropy(
            logits.flatten(0, 1), tags.flatten(), reduction="none"
        )
        per_token = per_token.view_as(mask)
        return (per_token * mask).sum() / mask.sum()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(12):
        tokens, tags = torch.randint(0, 50, (4, 8)), torch.randint(0, 5, (4, 8))
        mask = torch.ones(4, 8)
        if step == 5 and dist.get_rank() == 1:
            mask.zero_()
        loss = model(tokens, tags, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
