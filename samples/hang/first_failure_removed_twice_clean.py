"""One rank removes the folder of an earlier run.

run: --nproc-per-node 2
finds: nothing
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def shared_folder():
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return os.path.join(names[0], "checkpoints")


def prepare(folder):
    exists = os.path.isdir(folder)
    dist.barrier()
    if exists and dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    os.makedirs(folder, exist_ok=True)


def main():
    dist.init_process_group("gloo")
    folder = shared_folder()
    if dist.get_rank() == 0:
        for number in range(600):
            os.makedirs(os.path.join(folder, f"step-{number}"))
    dist.barrier()
    prepare(folder)
    model = DDP(torch.nn.Linear(4, 2))
    model(torch.randn(8, 4)).square().mean().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
