"""Different lines on different ranks that are one collective, and collectives on all ranks.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist


def receive_weights(tensor):
    dist.broadcast(tensor, src=0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.randn(16) if rank == 0 else torch.empty(16)
    if rank == 0:
        dist.broadcast(weight, src=0)
    else:
        receive_weights(weight)
    weight.requires_grad_()
    for step in range(40):
        loss = (weight - torch.randn(16)).pow(2).sum()
        loss.backward()
        # A rank without data takes part with zeros, from another line.
        if (step + rank) % 7:
            dist.all_reduce(weight.grad)
        else:
            dist.all_reduce(torch.zeros_like(weight.grad))
        dist.barrier()
        with torch.no_grad():
            weight -= 0.05 * weight.grad
        weight.grad = None
        if rank == 0 and step % 10 == 9:
            print(step, loss.item())
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, list(range(rank + 1)))
    dist.barrier()
    dist.destroy_process_group()


main()
