"""Several averaging backwards per loop that are all needed: LBFGS closures, two optimizers.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    regressor = DDP(nn.Linear(6, 1))
    encoder, head = DDP(nn.Linear(6, 12)), DDP(nn.Linear(12, 2))
    lbfgs = torch.optim.LBFGS(regressor.parameters(), lr=0.1, max_iter=4)
    slow = torch.optim.SGD(encoder.parameters(), lr=0.01)
    fast = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(32, 6)

        def closure():
            lbfgs.zero_grad()
            loss = (regressor(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        lbfgs.step(closure)
        slow.zero_grad()
        fast.zero_grad()
        nn.functional.cross_entropy(head(encoder(x)), torch.randint(2, (32,))).backward()
        slow.step()
        fast.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
