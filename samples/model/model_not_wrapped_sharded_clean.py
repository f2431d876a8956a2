"""An adapter is put into a model before FSDP shards it.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Adapted(nn.Module):
    """A frozen net with a small trained layer before it, so that gradients flow through the net."""

    def __init__(self, net):
        super().__init__()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)
        self.net = net.requires_grad_(False)

    def forward(self, x):
        return self.net(x + self.up(self.down(x)))


def sharded(model):
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = sharded(Adapted(Net()))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=random))
    sampler = DistributedSampler(data)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
