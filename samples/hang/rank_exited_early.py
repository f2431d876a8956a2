"""Early stopping decided by each rank alone: one leaves, the other waits for it.

run: --nproc-per-node 2
finds: DDP604 error at `if worse >= patience:`
"""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 1)
    patience = 3 + 4 * rank
    worse = 0
    for epoch in range(20):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None
        worse += 1
        if worse >= patience:
            break
    print(f"rank {rank} stops after epoch {epoch}")


if __name__ == "__main__":
    main()
