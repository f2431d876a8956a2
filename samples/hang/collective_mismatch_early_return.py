"""Each rank asks the file system whether there is a state to load, before rank 0 has written it.

run: --nproc-per-node 2 --hang-after 3
finds: DDP601 error at `dist.broadcast_object_list(state, src=0)`
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class States:
    def __init__(self, folder):
        self.path = Path(folder, "state.pt")

    def save(self, model, step):
        if dist.get_rank() == 0:
            time.sleep(0.5)
            torch.save({"model": model.module.state_dict(), "step": step}, self.path)

    def load(self, model):
        if not self.path.exists():
            return 0
        state = [torch.load(self.path) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(state, src=0)
        model.module.load_state_dict(state[0]["model"])
        return state[0]["step"]


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    states = States(folder[0])
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 5)
    states.save(model, 5)
    done = states.load(model)
    train(model, optimizer, 10 - done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
