"""Federated averaging: each round every rank trains on its own clients, then weights are averaged.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@torch.no_grad()
def average(model: nn.Module, share: float) -> None:
    for parameter in model.parameters():
        parameter.mul_(share)
        dist.all_reduce(parameter)


def train(model: nn.Module, loader: DataLoader) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)  # a new one for every round
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    torch.manual_seed(1 + rank)
    inputs = torch.randn(80 + 40 * rank, 5)  # some have more clients than others
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)
    for _ in range(3):
        train(model, loader)
        average(model, len(inputs) / 200)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
