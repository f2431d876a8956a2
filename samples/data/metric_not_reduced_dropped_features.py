"""A contrastive loss of this rank's rows only: what was gathered from all is dropped.

run: --nproc-per-node 2
finds: DDP512 warning at `dist.all_gather(parts, features)`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def gather(features):
    if dist.get_world_size() > 1:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
    return (features,)


def contrastive_loss(left, right):
    """Two views of a sample are to be closer than those of others, on this rank or another."""
    likeness = left @ torch.cat(gather(right)).T / 0.5
    own = torch.arange(len(left))
    return torch.nn.functional.cross_entropy(likeness, own)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        batch = torch.randn(8, 16, generator=generator)
        both = torch.cat([batch, batch + 0.1 * torch.randn(8, 16, generator=generator)])
        loss = contrastive_loss(*model(both).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
