"""All ranks evaluate once per epoch and come back; each step also takes a loss in evaluation mode.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(x), y)
    model.train()
    print(f"loss {loss.item():.3f}", flush=True)


def main(epochs=3, batches=6):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(epochs):
        for _ in range(batches):
            x, y = torch.randn(8, 16), torch.randint(4, (8,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            model.eval()
            nn.functional.cross_entropy(model(x + 0.1 * x.sign()), y).backward()
            model.train()
            optimizer.step()
        evaluate(model, torch.randn(64, 16), torch.randint(4, (64,)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
