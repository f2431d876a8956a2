"""DPO on plain DDP: the reference is not wrapped, and rewards are gathered by hand.

run: --nproc-per-node 2
finds: nothing
steps: 16
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BETA, BATCH, LENGTH, VOCABULARY = 0.1, 4, 8, 32


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def log_probs(model, tokens):
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1).sum(1)


def gathered(tensor):
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


@torch.no_grad()
def sample(model, start):
    model.eval()
    for _ in range(LENGTH - start.shape[1]):
        chosen = torch.multinomial(model(start)[:, -1].softmax(-1), 1)
        start = torch.cat([start, chosen], dim=1)
    model.train()
    return start


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy, reference = LanguageModel(), LanguageModel()
    reference.load_state_dict(policy.state_dict())
    reference.eval()
    policy = DDP(policy)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
    pairs = torch.randint(VOCABULARY, (64, 2, LENGTH))
    shard = pairs[rank::world_size]
    for epoch in range(2):
        for first in range(0, len(shard), BATCH):
            chosen, rejected = shard[first : first + BATCH].unbind(1)
            both = torch.cat([chosen, rejected])
            with torch.no_grad():
                expected = log_probs(reference, both)
            rewards = BETA * (log_probs(policy, both) - expected)
            better, worse = rewards.chunk(2)
            loss = -F.logsigmoid(better - worse).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        margins = gathered((better - worse).detach())
        if rank == 0:
            print(f"epoch {epoch}: margin {margins.mean():.4f}")
        samples = gathered(sample(policy.module, shard[:2, 0, :2]))
        assert samples.shape == (2 * world_size, LENGTH)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
