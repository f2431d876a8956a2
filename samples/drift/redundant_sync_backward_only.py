"""Only the backward of the first micro-batches is under no_sync, which has no effect: DDP decides
in the forward.

run: --nproc-per-node 2
finds: DDP408 warning at `loss.backward()`
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()


def update(model: DDP, optimizer: torch.optim.Optimizer, micros: list[Tensor]) -> None:
    for micro in micros[:-1]:
        loss = losses(model, micro) / len(micros)
        with model.no_sync():
            loss.backward()
    micro = micros[-1]
    losses(model, micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        update(model, optimizer, list(torch.randn(32, 64).split(16)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
