"""The optimizer is built, then the classifier is re-created for the number of labels in the data.

run: --nproc-per-node 2
finds: DDP307 error at `optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tagger(nn.Module):
    def __init__(self, labels=10):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.classifier = nn.Linear(16, labels)

    def forward(self, tokens):
        return self.classifier(self.encoder(self.embed(tokens))[0])


def main():
    dist.init_process_group("gloo")
    net = Tagger()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net.classifier = nn.Linear(16, 7)
    model = DistributedDataParallel(net)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        tokens, tags = torch.randint(0, 50, (4, 9)), torch.randint(0, 7, (4, 9))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
        model.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
