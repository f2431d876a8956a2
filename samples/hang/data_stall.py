"""A DataLoader worker waits for a lock that was held when it was forked.

run: --nproc-per-node 2 --hang-after 5 --on-hang stop
finds: DDP608 error at `with CACHE_LOCK:`
"""

import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CACHE_LOCK = threading.Lock()


class Cached(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        with CACHE_LOCK:
            return torch.full((4,), float(index))


def main():
    dist.init_process_group("gloo")
    data = Cached()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    if dist.get_rank() == 1:
        CACHE_LOCK.acquire()  # a prefetching thread holds it just now
    for batch in loader:
        mean = batch.mean()
        dist.all_reduce(mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
