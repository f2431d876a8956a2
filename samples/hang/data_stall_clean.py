"""A slow first batch that does come.

run: --nproc-per-node 2 --hang-after 2
finds: nothing
"""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Slow(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 1:
            time.sleep(4)  # opens the archive
        return torch.full((4,), float(index))


def main():
    dist.init_process_group("gloo")
    data = Slow()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    for batch in loader:
        mean = batch.mean()
        dist.all_reduce(mean)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
