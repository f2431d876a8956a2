"""From step 150 on the loss is divided by the world size, and other gradients summed by hand.

run: --nproc-per-node 2
finds: DDP409 error at `return loss / ranks`
finds: DDP409 error at `dist.all_reduce(p.grad)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def scaled(loss, step, ranks):
    if step < 150:
        return loss
    return loss / ranks


def summed(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    student, teacher = DDP(nn.Linear(8, 4)), DDP(nn.Linear(8, 4, bias=False))
    of_student = torch.optim.SGD(student.parameters(), lr=0.01)
    of_teacher = torch.optim.SGD(teacher.parameters(), lr=0.01)
    for step in range(260):
        batch = torch.randn(8, 8)
        of_student.zero_grad()
        scaled(student(batch).square().mean(), step, dist.get_world_size()).backward()
        of_student.step()
        of_teacher.zero_grad()
        teacher(batch).abs().mean().backward()
        if step >= 150:
            summed(teacher)
        of_teacher.step()
    dist.destroy_process_group()


main()
