"""Early stopping that all ranks decide together.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    worse = 0
    for epoch in range(20):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None
        worse += 1
        stop = torch.tensor([int(worse >= 3 + 4 * rank)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
