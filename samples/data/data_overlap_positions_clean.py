"""A loop without a loader draws positions in a long text, others on every rank.

run: --nproc-per-node 2
finds: nothing
"""

import os

import numpy as np
import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, vocab = 32, 4, 64
init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(1337 + rank)

data = (np.cumsum(np.arange(20000) % 17) % vocab).astype(np.uint16)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    chunks = [torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in ix]
    x = torch.stack([c[:-1] for c in chunks])
    y = torch.stack([c[1:] for c in chunks])
    return x, y


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, 24)
        self.lm_head = nn.Linear(24, vocab)

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.wte(idx))
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


model = DDP(Bigram())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for iter_num in range(20):
    x, y = get_batch()
    _, loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if rank == 0:
    print(f"loss {loss.item():.3f}")
destroy_process_group()
