"""Each process chooses a free port for the store by itself.

run: --nproc-per-node 2 --hang-after 3
finds: DDP102 error at `os.environ["MASTER_PORT"] = str(free_port())`
"""

import os
import socket

import torch.distributed as dist
import torch.multiprocessing as mp


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def work(rank, size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())
    dist.init_process_group("gloo", rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
