"""A sharded model, and answers of very different lengths: each rank averages over its own.

run: --nproc-per-node 2
finds: DDP410 warning at `loss.backward()`
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

IGNORED = -100


def batch(generator, long):
    """Four samples with long or short answers, as a sampler that sorts by length gives."""
    tokens = torch.randint(0, 30, (4, 32), generator=generator)
    answers = (
        torch.randint(20, 30, (4,), generator=generator) if long else torch.tensor([2, 1, 3, 1])
    )
    return tokens, tokens.masked_fill(torch.arange(32) < 32 - answers[:, None], IGNORED)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(30):
        tokens, labels = batch(generator, (step + dist.get_rank()) % 2)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
