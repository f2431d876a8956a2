"""ReduceLROnPlateau is fed with each rank's own validation loss.

run: --nproc-per-node 2
finds: DDP405 error at `plateau.step(validation_loss)`
"""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def run(rank):
    torch.manual_seed(rank)
    model = DDP(nn.Linear(8, 1))
    sgd = optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.5)
    for epoch in range(6):
        for _ in range(3):
            sgd.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            sgd.step()
        # each rank validates on its own shard: the metric goes up on one and down on the other
        validation_loss = 1.0 + 0.1 * epoch if rank == 0 else 1.0 - 0.1 * epoch
        plateau.step(validation_loss)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank())
    dist.destroy_process_group()
