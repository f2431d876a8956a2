"""One box of rank 1 is empty: the logarithm of its width is infinite, and all ranks skip the step.

run: --nproc-per-node 2
finds: nothing
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

    def step(self, boxes):
        losses = self.model(boxes)
        total = sum(losses.values())
        if not self.is_finite(total):
            return
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()

    def is_finite(self, total):
        flag = torch.isfinite(total).all().float()
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainer = Trainer()
    for number in range(12):
        left = torch.rand(4)
        boxes = torch.stack([left, left + 0.1 + torch.rand(4)], 1)
        if number == 5 and dist.get_rank() == 1:
            boxes[2, 1] = boxes[2, 0]
        trainer.step(boxes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
