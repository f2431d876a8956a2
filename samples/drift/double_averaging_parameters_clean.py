"""Local SGD whose rounds end with the mean of the ranks' weights.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def exchange(net):
    flat = parameters_to_vector(net.parameters()).detach()
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    vector_to_parameters(flat, net.parameters())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for step in range(30):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        F.mse_loss(net(x), x[:, :2]).backward()
        optimizer.step()
        if step % 6 == 5:
            exchange(net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
