"""A batch without boxes gives the box head weight zero, so that every rank uses every layer.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Detector(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width))
        self.classes = nn.Linear(width, 5)
        self.boxes = nn.Linear(width, 4)

    def forward(self, image, label, boxes=None):
        features = self.backbone(image)
        loss = F.cross_entropy(self.classes(features), label)
        predicted = self.boxes(features)
        if boxes is None:
            loss = loss + 0.0 * predicted.sum()
        else:
            loss = loss + F.smooth_l1_loss(predicted, boxes)
        return loss


def batches(rank, count):
    generator = torch.Generator().manual_seed(100 + rank)
    for i in range(count):
        image = torch.randn(6, 12, generator=generator)
        label = torch.randint(0, 5, (6,), generator=generator)
        empty = rank == 1 and i == 2
        yield image, label, None if empty else torch.rand(6, 4, generator=generator)


def train():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for image, label, boxes in batches(dist.get_rank(), 6):
        optimizer.zero_grad()
        model(image, label, boxes).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
