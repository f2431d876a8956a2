"""A stop command reaches rank 0 alone; the barrier after each batch does not hand the flag on.

run: --nproc-per-node 2
finds: DDP601 error at `if self.rank == 0 and number == 12:`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, epochs, batches):
        self.epochs, self.batches, self.should_stop = epochs, batches, False
        self.rank = dist.get_rank()
        self.model = DDP(torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, number):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * number + self.rank))
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def on_batch_end(self, number):
        if self.rank == 0 and number == 12:
            self.should_stop = True
        dist.barrier()

    def fit(self):
        for epoch in range(self.epochs):
            for batch in range(self.batches):
                number = epoch * self.batches + batch
                self.training_step(number)
                self.on_batch_end(number)
                if self.should_stop:
                    break
            if self.should_stop:
                break
        norm = torch.stack([p.detach().norm() for p in self.model.parameters()])
        dist.all_reduce(norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(epochs=4, batches=10).fit()
    dist.destroy_process_group()
