"""Rank 0 evaluates and saves while the other waits, longer than one would think, and comes back.

run: --nproc-per-node 2 --hang-after 2
finds: nothing
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.zeros(1)
for epoch in range(2):
    for step in range(5):
        total += step
        dist.all_reduce(total)
    if dist.get_rank() == 0:
        time.sleep(3.5)  # evaluation on one rank
    dist.barrier()
dist.destroy_process_group()
