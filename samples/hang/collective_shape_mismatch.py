"""Metrics reduced with MAX on one rank and SUM on the other: wrong numbers, no error.

run: --nproc-per-node 2
finds: DDP602 error at `dist.all_reduce(value, op=op)`
"""

import torch
import torch.distributed as dist


class Meter:
    def __init__(self, reduce):
        self.reduce = reduce
        self.total = 0.0

    def update(self, value):
        self.total += value

    def synced(self):
        value = torch.tensor([self.total])
        op = dist.ReduceOp.SUM if self.reduce == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(value, op=op)
        return value.item()


def main():
    dist.init_process_group("gloo")
    meter = Meter("sum")
    for epoch in range(4):
        meter.update(1.0 + dist.get_rank())
        if epoch == 2 and dist.get_rank() == 1:
            meter.reduce = "max"  # a configuration file that only this node has
        print(epoch, meter.synced())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
