"""A stage sends without keeping the handles, and its program ends with messages in flight.

run: --nproc-per-node 2
finds: DDP604 error at `dist.isend(batch @ weight, dst=1)`
"""

import time

import torch
import torch.distributed as dist

SIZE = 1 << 20


def main():
    dist.init_process_group("gloo")
    weight = torch.eye(8)
    batches = [torch.randn(SIZE // 8, 8) for _ in range(16)]
    if dist.get_rank() == 0:
        for batch in batches:
            dist.isend(batch @ weight, dst=1)
        return
    time.sleep(1.0)
    taken = torch.empty(SIZE // 8, 8)
    for _ in batches:
        dist.recv(taken, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
