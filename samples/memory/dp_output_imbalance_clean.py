"""DataParallel on one device, or on none, wraps nothing that matters.

run: exec -- python {}
finds: nothing
"""

import torch
from torch import nn


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = nn.DataParallel(net, device_ids=[0] if device == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        x, y = torch.randn(16, 64, device=device), torch.randint(0, 10, (16,), device=device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
