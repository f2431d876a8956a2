"""The validation loss is averaged over the ranks before ReduceLROnPlateau sees it.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def run(rank):
    torch.manual_seed(rank)
    model = DDP(nn.Linear(8, 1))
    groups = [{"params": model.module.weight}, {"params": model.module.bias, "weight_decay": 0.0}]
    sgd = optim.SGD(groups, lr=0.1, weight_decay=1e-4)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.5)
    warmup = optim.lr_scheduler.LambdaLR(sgd, lambda step: min(1.0, (step + 1) / 4))
    for epoch in range(6):
        for _ in range(3):
            sgd.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            sgd.step()
            if epoch < 2:
                warmup.step()
        own = 1.0 + 0.1 * epoch if rank == 0 else 1.0 - 0.05 * epoch
        validation_loss = torch.tensor(own)
        dist.all_reduce(validation_loss)
        plateau.step(validation_loss / dist.get_world_size())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank())
    dist.destroy_process_group()
