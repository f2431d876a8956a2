"""Rank 1 waits for a file that rank 0 never writes, while rank 0 waits for rank 1.

run: --nproc-per-node 2 --hang-after 5 --on-hang stop
finds: DDP603 error at `time.sleep(0.5)`
"""

import os
import time

import torch
import torch.distributed as dist


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.5)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.zeros(1)
    for step in range(20):
        total += step
        dist.all_reduce(total)
        if step == 10 and rank == 1:
            wait_for("/nonexistent/ready.flag")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
