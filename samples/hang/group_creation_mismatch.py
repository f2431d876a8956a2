"""Each rank creates only the group that it belongs to.

run: --nproc-per-node 4
finds: DDP607 error at `return dist.new_group(members)`
"""

import torch
import torch.distributed as dist


def my_group(rank, size):
    first = rank // size * size
    members = list(range(first, first + size))
    return dist.new_group(members)


def main():
    dist.init_process_group("gloo")
    group = my_group(dist.get_rank(), 2)
    x = torch.ones(2) * dist.get_rank()
    dist.all_reduce(x, group=group)
    print(x)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
