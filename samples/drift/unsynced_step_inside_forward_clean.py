"""The forward of the wrapper is a whole training step, which has DDP prepared for each backward.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer(nn.Module):
    """A model whose forward is a whole training step, as in some frameworks."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(4, 8)
        self.critic = nn.Linear(8, 1)

    def prepare(self):
        self.optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.Adam(self.critic.parameters(), lr=1e-2),
        ]

    def backward(self, loss):
        (model,) = self.wrapper
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([loss])
        loss.backward()
        model.require_backward_grad_sync = False  # the forward that this is in prepares nothing

    def forward(self, real):
        for_generator, for_critic = self.optimizers
        for_generator.zero_grad()
        self.critic.requires_grad_(False)
        self.backward(-self.critic(self.generator(torch.randn(len(real), 4))).mean())
        for_generator.step()
        self.critic.requires_grad_(True)
        for_critic.zero_grad()
        fake = self.generator(torch.randn(len(real), 4)).detach()
        self.backward(self.critic(fake).mean() - self.critic(real).mean())
        for_critic.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = Trainer()
    trainer.prepare()
    model = DDP(trainer, find_unused_parameters=True)
    trainer.wrapper = [model]
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(6):
        model(torch.randn(4, 8))
        model.require_backward_grad_sync = True
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
