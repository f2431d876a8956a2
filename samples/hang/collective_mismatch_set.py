"""Gradients are summed in the order of a set of parameters, which is another one in every process.

run: --nproc-per-node 2
finds: DDP601 error at `dist.all_reduce(parameter.grad)`
"""

import torch
import torch.distributed as dist


def average_gradients(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    spare = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5 * rank)]
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    del spare
    trained = {p for p in model.parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draws = torch.Generator().manual_seed(rank)
    for step in range(12):
        inputs = torch.randn(16, 8, generator=draws)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(trained)
        optimizer.step()
        if rank == 0:
            print(step, f"{loss.item():.4f}")
    dist.destroy_process_group()


main()
