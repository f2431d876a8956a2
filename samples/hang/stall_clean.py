"""A ring of sends and receives that fits, and a long computation on both ranks.

run: --nproc-per-node 2 --hang-after 2
finds: nothing
"""

import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine, theirs = torch.full((4,), float(rank)), torch.empty(4)
    for _ in range(3):
        works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
        for work in works:
            work.wait()
    if rank == 0:
        dist.send(mine, dst=1)
        dist.recv(theirs, src=1)
    else:
        dist.recv(theirs, src=0)
        dist.send(mine, dst=0)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        torch.randn(100, 100).inverse()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
