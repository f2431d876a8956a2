"""Exceptions that are caught and handled, on every rank and on one.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.zeros(3)
    for step in range(10):
        try:
            if step == 4 and rank == 1:
                raise ValueError("a bad sample")
            total += step
        except ValueError:
            print("skipped one sample")
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    raise SystemExit(0)
