"""No wrapper, but the gradients are averaged by hand, in one flat buffer.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, averaged in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
        gradient.copy_(averaged)


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
    dist.destroy_process_group()


main()
