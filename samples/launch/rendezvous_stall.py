"""Rank 1 waits for a licence server that does not answer, before it joins.

run: --nproc-per-node 2 --hang-after 5 --on-hang stop
finds: DDP102 error at `sock.recv(1)`
"""

import os
import socket

import torch
import torch.distributed as dist


def checkout_licence():
    sock, _server = socket.socketpair()
    sock.recv(1)


def main():
    if int(os.environ["RANK"]) == 1:
        checkout_licence()
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
