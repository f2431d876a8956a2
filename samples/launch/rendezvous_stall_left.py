"""Rank 1 has no files, and returns before it joins.

run: --nproc-per-node 2 --hang-after 5
finds: DDP102 error at `if not files:`
"""

import os
import sys

import torch
import torch.distributed as dist

FILES = ["part-0", "part-2"]


def main():
    rank = int(os.environ["RANK"])
    files = [f for f in FILES if int(f[-1]) % 2 == rank]
    if not files:
        return 0
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
