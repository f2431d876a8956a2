"""World size counted by hand: nodes times "devices per node", and two devices are not there.

run: --nproc-per-node 2
finds: DDP101 error at `dist.init_process_group(`
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices-per-node", type=int, default=4)
    args = parser.parse_args()
    args.rank = int(os.environ["LOCAL_RANK"])
    args.world = args.nodes * args.devices_per_node
    return args


def main():
    args = parse()
    dist.init_process_group(
        "gloo", rank=args.rank, world_size=args.world, timeout=timedelta(seconds=5)
    )
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
