"""Weights are loaded after the wrap with `assign=True`: none of the model's parameters is one that
the wrapper was given.

run: --nproc-per-node 2
finds: DDP306 error at `net.load_state_dict(weights, assign=True)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weights = {name: torch.randn(size) for name, size in (("weight", (3, 6)), ("bias", (3,)))}
    net = nn.Linear(6, 3)
    model = DDP(net)
    net.load_state_dict(weights, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
