"""Rank 0 waits at a barrier before it logs; the others are in the next all_reduce already.

run: --nproc-per-node 2
finds: DDP601 error at `dist.barrier()`
"""

import torch
import torch.distributed as dist


def log(rank, step, value):
    if rank == 0:
        dist.barrier()
        print(f"step {step}: {value:.3f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.zeros(16, requires_grad=True)
    for step in range(40):
        loss = (weight - torch.randn(16)).pow(2).sum()
        loss.backward()
        dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
        with torch.no_grad():
            weight -= 0.05 * weight.grad / dist.get_world_size()
        weight.grad = None
        if step % 10 == 9:
            log(rank, step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
