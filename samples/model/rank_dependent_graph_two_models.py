"""Two models train in turn. In one late step a rank has no boxes to learn from, and the other model
takes the collectives that the first one waits for.

run: --nproc-per-node 2
finds: DDP302 error at `if boxes is not None:`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.classes = nn.Linear(8, 2)
        self.boxes = nn.Linear(8, 4)

    def forward(self, x, boxes):
        h = torch.relu(self.body(x))
        loss = nn.functional.cross_entropy(self.classes(h), (x[:, 0] > 0).long())
        if boxes is not None:
            loss = loss + nn.functional.l1_loss(self.boxes(h), boxes)
        return loss


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    encoder, detector = DDP(nn.Linear(6, 6)), DDP(Detector())
    first = torch.optim.SGD(encoder.parameters(), lr=0.05)
    second = torch.optim.SGD(detector.parameters(), lr=0.05)
    for step in range(30):
        x = torch.randn(8, 6)
        first.zero_grad()
        (encoder(x) - x).pow(2).mean().backward()
        first.step()
        boxes = None if step == 20 and rank == 1 else torch.randn(8, 4)
        second.zero_grad()
        detector(x, boxes).backward()
        second.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
