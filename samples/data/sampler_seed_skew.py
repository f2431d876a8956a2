"""The seed of the sampler has the rank added, as is right for augmentation only.

run: --nproc-per-node 2
finds: DDP506 error at `sampler = DistributedSampler(dataset, seed=args.seed + dist.get_rank())`
"""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sentences(Dataset):
    def __init__(self):
        self.lines = [f"{n} is followed by {n + 1}" for n in range(80)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


def collate(lines):
    ids = [torch.tensor([ord(c) for c in line]) for line in lines]
    return {"ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), "text": lines}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    dataset = Sentences()
    sampler = DistributedSampler(dataset, seed=args.seed + dist.get_rank())
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 16), torch.nn.Linear(16, 128))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            logits = model(batch["ids"][:, :-1])
            target = batch["ids"][:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
