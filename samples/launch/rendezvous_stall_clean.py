"""Rank 1 is slow to come, and comes.

run: --nproc-per-node 2 --hang-after 2
finds: nothing
"""

import os
import time

import torch
import torch.distributed as dist


def main():
    if int(os.environ["RANK"]) == 1:
        time.sleep(5)
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
