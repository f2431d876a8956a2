"""A running loss is averaged inside `Join`, which ranks without inputs do not answer.

run: --nproc-per-node 2
finds: DDP601 error at `loss = average(loss)`
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def average(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for _ in range(6 + 4 * dist.get_rank()):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = average(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
