"""The text tower gets no gradient: `dist.all_gather` passes none on.

run: --nproc-per-node 2
finds: DDP301 error at `self.text = nn.Linear(12, 4)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(8, 4)
        self.text = nn.Linear(12, 4)

    def forward(self, image, text):
        own = self.text(text)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        scores = self.image(image) @ torch.cat(parts).T
        return cross_entropy(scores, torch.arange(len(image)) + len(image) * dist.get_rank())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(TwoTowers(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        loss = model(torch.randn(4, 8), torch.randn(4, 12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
