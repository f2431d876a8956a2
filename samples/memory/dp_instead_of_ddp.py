"""Several GPUs in one process through DataParallel.

run: exec -- python {}
needs: 2 gpus
finds: DDP202 note at `model = nn.DataParallel(net)`
"""

import torch
from torch import nn


def main():
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
    model = nn.DataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        x, y = torch.randn(64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
