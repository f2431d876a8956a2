"""A warm-up and a linear fall are planned for the batches of the whole data set; ranks take half.

run: --nproc-per-node 2
finds: DDP413 warning at `return LambdaLR(optimizer, partial(factor, **plan))`
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH = 3, 8


def factor(step, *, num_warmup_steps, num_training_steps):
    if step < num_warmup_steps:
        return step / num_warmup_steps
    left = num_training_steps - step
    return max(0.0, left / (num_training_steps - num_warmup_steps))


def warmup_and_decay(optimizer, num_warmup_steps, num_training_steps):
    plan = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    return LambdaLR(optimizer, partial(factor, **plan))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 6), torch.randn(128, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = EPOCHS * len(data) // BATCH
    scheduler = warmup_and_decay(optimizer, 4, total)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
