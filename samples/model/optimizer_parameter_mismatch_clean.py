"""Two optimizers share the model between them; the embedding is frozen and in neither.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tagger(nn.Module):
    def __init__(self, labels=7):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.classifier = nn.Linear(16, labels)

    def forward(self, tokens):
        return self.classifier(self.encoder(self.embed(tokens))[0])


def main():
    dist.init_process_group("gloo")
    net = Tagger()
    net.embed.requires_grad_(False)
    slow = torch.optim.SGD(net.encoder.parameters(), lr=1e-3)
    model = DistributedDataParallel(net)
    decay = [p for p in net.classifier.parameters() if p.ndim > 1]
    plain = [p for p in net.classifier.parameters() if p.ndim == 1]
    fast = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        tokens, tags = torch.randint(0, 50, (4, 9)), torch.randint(0, 7, (4, 9))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
        model.zero_grad()
        loss.backward()
        slow.step()
        fast.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
