"""Sizes that may differ: objects, uneven all_to_all, one element more or less in the shape only.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

gathered = [None] * world
dist.all_gather_object(gathered, {"name": "x" * (rank + 1) * 10})

row = torch.ones(6) if rank == 0 else torch.ones(2, 3)
dist.all_reduce(row)

mine = torch.arange(3.0) + rank
give, take = ([1, 2], [1, 1]) if rank == 0 else ([1, 2], [2, 2])
out = torch.empty(sum(take))
dist.all_to_all_single(out, mine, take, give)

for source in range(world):
    weights = torch.full((4,), float(source))
    dist.broadcast(weights, src=source)

best = torch.tensor([float(rank)])
dist.all_reduce(best, op=dist.ReduceOp.MAX)
dist.barrier()
dist.destroy_process_group()
