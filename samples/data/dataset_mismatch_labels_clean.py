"""The classes are sorted before they are numbered, so that every rank has the same numbers.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BIRDS = "wren robin heron crane stork swift raven finch eagle gull owl kite".split()


class Birds(Dataset):
    def __init__(self, inputs, names):
        self.inputs, self.names = inputs, names
        self.numbers = {name: i for i, name in enumerate(sorted(set(names)))}

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.inputs[index], self.numbers[self.names[index]]


def main():
    dist.init_process_group("gloo")
    inputs = torch.randn(144, 8, generator=torch.Generator().manual_seed(1))
    birds = Birds(inputs, [BIRDS[i * 7 % len(BIRDS)] for i in range(144)])
    sampler = DistributedSampler(birds)
    loader = DataLoader(birds, batch_size=12, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(8, len(BIRDS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, label in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), label).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
