"""Every rank continues its loader from the state that it saved itself.

run: --nproc-per-node 2
finds: nothing
steps: 12
needs: torchdata
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Shards(IterableDataset):
    def __init__(self, shards):
        self.left = list(shards)

    def __iter__(self):
        while self.left:
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(self.left[0]))
            yield from zip(x, x.sum(1, keepdim=True), strict=True)
            self.left.pop(0)

    def state_dict(self):
        return {"left": list(self.left)}

    def load_state_dict(self, state):
        self.left = list(state["left"])


def train(model, loader, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def make_loader():
    shards = range(dist.get_rank(), 16, dist.get_world_size())
    return StatefulDataLoader(Shards(shards), batch_size=16)


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / f"last-{dist.get_rank()}.pt"
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    loader = make_loader()
    train(model, loader, 4)
    torch.save({"loader": loader.state_dict()}, path)

    saved = torch.load(path)
    loader = make_loader()
    loader.load_state_dict(saved["loader"])
    train(model, loader, 8)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
