"""Each rank seeds itself once the model is built, so a diffusion step draws noise of its own.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Flow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(9, 8)

    def forward(self, actions):
        noise, times = torch.randn_like(actions), torch.rand(len(actions), 1)
        mixed = times * noise + (1 - times) * actions
        return (self.net(torch.cat([mixed, times], -1)) - (noise - actions)).square().mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    data = TensorDataset(torch.randn(160, 8))
    sampler = DistributedSampler(data)
    model = DDP(Flow())
    torch.manual_seed(42 + dist.get_rank())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (actions,) in loader:
            optimizer.zero_grad()
            loss = model(actions)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
