"""A stage keeps the handles of its messages and waits for them before its program ends.

run: --nproc-per-node 2
finds: nothing
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
        outputs = [batch @ weight for batch in batches]
        works = [dist.isend(output, dst=1) for output in outputs]
        for work in works:
            work.wait()
        dist.destroy_process_group()
        return
    time.sleep(1.0)
    taken = torch.empty(SIZE // 8, 8)
    for _ in batches:
        dist.recv(taken, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
