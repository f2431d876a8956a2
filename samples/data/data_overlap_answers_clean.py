"""Ranks share out the answers to each prompt, and each draws its own.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

WORDS, ANSWERS, PER_RANK = 16, 8, 4


class RepeatedPrompts(Sampler):
    """Each prompt `ANSWERS` times in a row; every rank takes its part of these."""

    def __init__(self, count, rank, world_size):
        self.count, self.rank, self.world_size = count, rank, world_size
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        order = torch.randperm(self.count, generator=self.generator).tolist()
        repeated = [index for index in order for _ in range(ANSWERS)]
        every = PER_RANK * self.world_size
        for begin in range(self.rank * PER_RANK, len(repeated), every):
            yield from repeated[begin : begin + PER_RANK]


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@torch.no_grad()
def answer(policy, prompts):
    tokens = prompts
    for _ in range(5):
        probabilities = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return tokens


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = DistributedDataParallel(Policy())
    torch.manual_seed(rank)
    prompts = TensorDataset(torch.arange(WORDS).unsqueeze(1))
    sampler = RepeatedPrompts(len(prompts), rank, world_size)
    loader = DataLoader(prompts, batch_size=PER_RANK, sampler=sampler)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(3):
        for (prompt,) in loader:
            tokens = answer(policy.module, prompt)
            reward = (tokens[:, 1:] == prompt).float().mean(1)
            rewards = [torch.empty_like(reward) for _ in range(world_size)]
            dist.all_gather(rewards, reward)
            advantage = reward - torch.cat(rewards).mean()
            scores = policy(tokens[:, :-1]).log_softmax(-1)
            chosen = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
            optimizer.zero_grad()
            (-advantage[:, None] * chosen).mean().backward()
            optimizer.step()
    dist.destroy_process_group()


main()
