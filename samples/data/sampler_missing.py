"""The loader shuffles for itself: every rank reads the whole data set.

run: --nproc-per-node 2
finds: DDP501 error at `loader = DataLoader(dataset, batch_size=16, shuffle=True)`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    centres = torch.randn(4, 20) * 3
    labels = torch.randint(0, 4, (200,))
    dataset = TensorDataset(centres[labels] + torch.randn(200, 20), labels)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)

    net = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
