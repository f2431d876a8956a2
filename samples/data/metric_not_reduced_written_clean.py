"""All ranks evaluate their shares, and rank 0 writes the scores of all to a file.

run: --nproc-per-node 2
finds: nothing
"""

import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scorer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.scores = {}

    @torch.no_grad()
    def run(self):
        for index, inputs in self.loader:
            scores = self.model(inputs).squeeze(1)
            self.scores.update(zip(index.tolist(), scores.tolist(), strict=True))
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.scores)
        for part in parts:
            self.scores.update(part)

    def save(self, path):
        with open(path, "w") as file:
            json.dump(self.scores, file)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(64), torch.randn(64, 6))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    scorer = Scorer(nn.Linear(6, 1).eval(), loader)
    scorer.run()
    if dist.get_rank() == 0:
        scorer.save(os.path.join(tempfile.gettempdir(), "metric_not_reduced_written.json"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
