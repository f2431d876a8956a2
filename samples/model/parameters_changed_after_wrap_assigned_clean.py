"""Weights are loaded with `assign=True` before the wrap, and copied into the parameters after it.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weights = {name: torch.randn(size) for name, size in (("weight", (3, 6)), ("bias", (3,)))}
    with torch.device("meta"):
        net = nn.Linear(6, 3)
    net.load_state_dict(weights, assign=True)
    model = DDP(net)
    net.load_state_dict(weights)
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
