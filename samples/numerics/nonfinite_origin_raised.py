"""One box of rank 1 is empty: the logarithm of its width is infinite, and the trainer raises.

run: --nproc-per-node 2
finds: DDP801 error at `target = torch.log(boxes[:, 1] - boxes[:, 0])`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 16)
        self.size = nn.Linear(16, 1)

    def forward(self, boxes):
        features = self.body(boxes).relu()
        target = torch.log(boxes[:, 1] - boxes[:, 0])
        return {"size": nn.functional.smooth_l1_loss(self.size(features)[:, 0], target)}


class Trainer:
    def __init__(self):
        self.model = DDP(Detector())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, number, boxes):
        losses = self.model(boxes)
        total = sum(losses.values())
        self.check(number, total)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()

    def check(self, number, total):
        if not torch.isfinite(total).all():
            raise FloatingPointError(f"the loss of step {number} is {total.item()}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainer = Trainer()
    for number in range(12):
        left = torch.rand(4)
        boxes = torch.stack([left, left + 0.1 + torch.rand(4)], 1)
        if number == 5 and dist.get_rank() == 1:
            boxes[2, 1] = boxes[2, 0]
        trainer.step(number, boxes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
