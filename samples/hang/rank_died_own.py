"""A watchdog of the program's own ends the rank that it is to watch over.

run: --nproc-per-node 2
finds: DDP605 error at `os.kill(os.getpid(), signal.SIGKILL)`
"""

import os
import signal

import torch
import torch.distributed as dist


def end_if_stuck(step: int) -> None:
    if dist.get_rank() == 1 and step == 30:
        os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
x = torch.ones(8)
for step in range(100):
    dist.all_reduce(x)
    x /= 2
    end_if_stuck(step)
dist.destroy_process_group()
