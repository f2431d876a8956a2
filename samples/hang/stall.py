"""Both ranks receive first: each waits for the other.

run: --nproc-per-node 2
finds: DDP609 error at `dist.recv(theirs, src=other)`
"""

import torch
import torch.distributed as dist


def exchange(mine, other):
    theirs = torch.empty_like(mine)
    dist.recv(theirs, src=other)
    dist.send(mine, dst=other)
    return theirs


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(exchange(torch.full((4,), float(rank)), 1 - rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
