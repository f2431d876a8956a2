"""A helper process is killed; that is no rank.

run: --nproc-per-node 2
finds: nothing
"""

import signal
import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
x = torch.ones(8)
for step in range(100):
    dist.all_reduce(x)
    x /= 2
helper.send_signal(signal.SIGKILL)
helper.wait()
dist.barrier()
dist.destroy_process_group()
