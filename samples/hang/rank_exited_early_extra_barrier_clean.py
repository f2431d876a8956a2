"""All ranks save once more, through a helper with a barrier.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, name):
    if dist.get_rank() == 0:
        print("saving", name, len(model.state_dict()))
    dist.barrier()


def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for _ in range(4):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(model, f"epoch {epoch}")


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    fit(model)
    save(model, "last")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
