"""Molecules of unequal sizes: each rank averages over the atoms of its own batch.

run: --nproc-per-node 2
finds: DDP410 note at `loss.backward()`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def batch(generator):
    """Four molecules of 4 to 40 atoms: which atom belongs to which, and what is known of each."""
    sizes = torch.randint(4, 41, (4,), generator=generator)
    molecule = torch.arange(4).repeat_interleave(sizes)
    return molecule, torch.randn(len(molecule), 8, generator=generator)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        molecule, atoms = batch(generator)
        error = (model(atoms) - atoms[:, :3]).norm(dim=-1)
        loss = error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
