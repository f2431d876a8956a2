"""DDP averages the body; each rank trains a head of its own, which DDP ignores, at its own rate.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class Client(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x))


def run(rank):
    torch.manual_seed(rank)
    client = Client()
    heads = [name for name, _ in client.named_parameters() if name.startswith("head.")]
    DDP._set_params_and_buffers_to_ignore_for_model(client, heads)
    model = DDP(client)
    shared = optim.Adam(client.body.parameters(), lr=1e-3)
    own = optim.SGD(client.head.parameters(), lr=0.1 / (1 + rank), momentum=0.9)
    for _ in range(20):
        shared.zero_grad()
        own.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        shared.step()
        own.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank())
    dist.destroy_process_group()
