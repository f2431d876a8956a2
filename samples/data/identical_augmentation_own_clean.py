"""A data set's own generator, which adds the rank to its seed.

run: --nproc-per-node 2
finds: nothing
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noise:
    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, x):
        return x + 0.05 * self.generator.random(dtype=np.float32)


class Noisy(Dataset):
    def __init__(self, seed):
        self.transforms = [Noise(seed)]
        self.clean = torch.arange(96.0).view(96, 1).repeat(1, 4) / 96

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        noisy = self.clean[i]
        for transform in self.transforms:
            noisy = transform(noisy)
        return noisy, self.clean[i]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42 + dist.get_rank())
    data = Noisy(42 + dist.get_rank())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for noisy, clean in loader:
            optimizer.zero_grad()
            (model(noisy) - clean).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
