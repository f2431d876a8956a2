"""Something outside kills one rank in the middle of training.

run: --nproc-per-node 2
finds: DDP605 error at `dist.all_reduce(x)`
"""

import os
import subprocess

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
x = torch.ones(8)
for step in range(100):
    dist.all_reduce(x)
    x /= 2
    if rank == 1 and step == 30:
        print("out of memory, as far as the kernel is concerned", flush=True)
        subprocess.run(["kill", "-KILL", str(os.getpid())])
dist.destroy_process_group()
