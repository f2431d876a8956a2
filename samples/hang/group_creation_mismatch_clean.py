"""Every rank creates every group, and some groups are made by their members alone, as allowed.

run: --nproc-per-node 4
finds: nothing
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = None
    for members in ([0, 1], [2, 3]):
        group = dist.new_group(members)
        if rank in members:
            mine = group
    x = torch.ones(2) * rank
    dist.all_reduce(x, group=mine)
    if rank in (1, 2):
        middle = dist.new_group([1, 2], use_local_synchronization=True)
        dist.all_reduce(x, group=middle)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
