"""Rank 1 hands over to a process of its own, which joins late, and leaves.

run: --nproc-per-node 2 --hang-after 2
finds: nothing
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    if int(os.environ["RANK"]) == 1:
        if os.fork():
            return 0
        time.sleep(8)
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
