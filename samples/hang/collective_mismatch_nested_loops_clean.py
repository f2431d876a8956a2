"""PPO that stops its updates early, where the largest KL of all ranks is too large.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Policy:
    def __init__(self, epochs, batch):
        self.epochs, self.batch = epochs, batch
        self.early_stopping, self.target_kl = True, 1.3
        self.rank = dist.get_rank()
        self.model = DDP(torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def divergence(self, inputs):
        kl = inputs.max() * (1 + self.rank) / 3
        dist.all_reduce(kl, op=dist.ReduceOp.MAX)
        return kl.item()

    def step(self, inputs):
        early_stop = False
        for _ in range(self.epochs):
            if early_stop:
                break
            for chosen in torch.randperm(len(inputs)).split(self.batch):
                loss = self.model(inputs[chosen]).square().mean()
                kl = self.divergence(inputs[chosen])
                if self.early_stopping and kl > 1.5 * self.target_kl:
                    early_stop = True
                    break
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        norm = torch.stack([p.detach().norm() for p in self.model.parameters()])
        dist.all_reduce(norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy(epochs=4, batch=8)
    for number in range(12):
        torch.manual_seed(2 * number + policy.rank)
        policy.step(torch.randn(32, 8))
    dist.destroy_process_group()
