"""The sum of the gradients is divided by the number of ranks before they are clipped.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable


def reduce_gradients(net):
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    begin = 0
    for p in net.parameters():
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


def reduce_after_backward(net):
    """One exchange in each backward, once all gradients are there."""
    waiting = []

    def queue(grad):
        if not waiting:
            waiting.append(True)
            Variable._execution_engine.queue_callback(reduce)

    def reduce():
        waiting.clear()
        reduce_gradients(net)

    for p in net.parameters():
        p.register_hook(queue)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    reduce_after_backward(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(20):
        x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
