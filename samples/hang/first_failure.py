"""A bad sample raises on one rank; the others only lose their connection.

run: --nproc-per-node 3
finds: DDP606 error at `return torch.tensor([float(word) for word in line.split()])`
"""

import torch
import torch.distributed as dist

LINES = ["1 2 3", "4 5 6", "7 8 9", "1 2 nine", "1 2 3", "4 5 6"]


def parse(line):
    return torch.tensor([float(word) for word in line.split()])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(3)
    for start in range(0, len(LINES), world):
        total += parse(LINES[start + (rank + 1) % world])
        dist.all_reduce(total)
    print(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
