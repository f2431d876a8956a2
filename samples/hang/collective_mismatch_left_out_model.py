"""Rank 1 has no samples for one of two wrapped models in a step, and does not run it there.

run: --nproc-per-node 2
finds: DDP601 error at `outputs = {name: self.nets[name](x) for name, x in batch.items()}`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Learner:
    def __init__(self):
        self.nets = {name: DDP(torch.nn.Linear(6, size)) for name, size in (("car", 4), ("bus", 2))}
        parameters = [p for net in self.nets.values() for p in net.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)

    def update(self, batch):
        outputs = {name: self.nets[name](x) for name, x in batch.items()}
        loss = sum(out.square().mean() for out in outputs.values())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    learner = Learner()
    draws = torch.Generator().manual_seed(rank)
    for step in range(12):
        batch = {name: torch.randn(8, 6, generator=draws) for name in ("car", "bus")}
        if (rank, step) == (1, 5):
            del batch["bus"]
        learner.update(batch)
    dist.destroy_process_group()


main()
