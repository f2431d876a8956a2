"""The last stage has nothing to report, and takes part in the gather all the same.

run: --nproc-per-node 3
finds: nothing
"""

import torch
import torch.distributed as dist


class Monitor:
    def __init__(self, watched):
        self.watched = watched

    def summary(self):
        part = {name: value.norm().item() for name, value in self.watched.items()}
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part)
        return parts


def step(layer, optimizer):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.randn(8, 4)
    if rank:
        dist.recv(x, rank - 1)
    y = layer(x)
    if rank < last:
        dist.send(y.detach(), rank + 1)
    optimizer.zero_grad()
    y.pow(2).mean().backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    last = dist.get_world_size() - 1
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    monitor = Monitor({} if dist.get_rank() == last else {"weight": layer.weight})
    for number in range(1, 13):
        step(layer, optimizer)
        if number % 6 == 0:
            monitor.summary()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
