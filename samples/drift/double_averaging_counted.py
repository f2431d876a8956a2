"""The loss of each rank is divided by the number of tokens of all ranks, and DDP averages as well.

run: --nproc-per-node 2
finds: DDP409 error at `return losses.sum() / count`
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, WIDTH, LENGTH = 40, 16, 12


def loss_of(model, tokens, mask):
    """The mean over all tokens of all ranks that are not masked."""
    scores = model(tokens[:, :-1]).transpose(1, 2)
    losses = cross_entropy(scores, tokens[:, 1:], reduction="none") * mask
    count = mask.sum()
    dist.all_reduce(count)
    return losses.sum() / count


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(
        torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        tokens = torch.randint(WORDS, (8, LENGTH), generator=random)
        mask = (torch.rand(8, LENGTH - 1, generator=random) < 0.8).float()
        loss = loss_of(model, tokens, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
