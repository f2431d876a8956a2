"""Rank and world size given by hand, and right.

run: --nproc-per-node 2
finds: nothing
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args()
    args.rank = int(os.environ["RANK"])
    args.world = args.nodes * int(os.environ["LOCAL_WORLD_SIZE"])
    return args


def main():
    args = parse()
    dist.init_process_group("gloo", "env://", rank=args.rank, world_size=args.world)
    torch.manual_seed(args.rank)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
