"""Running totals of an evaluation are summed over the ranks after each batch, again and again.

run: --nproc-per-node 2
finds: DDP512 warning at `dist.all_reduce(totals)`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Average:
    """A metric as a sum and a count, with the number of samples that it is made of."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, count=1):
        self.total += value
        self.count += count

    def reduce(self):
        totals = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(totals)
        self.total, self.count = totals.tolist()

    @property
    def value(self):
        return self.total / self.count


def loader(count, seed, shuffle):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    data = TensorDataset(x, x[:, :4].argmax(1))
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=shuffle))


@torch.no_grad()
def evaluate(model, batches):
    loss, accuracy = Average(), Average()
    for x, y in batches:
        out = model(x)
        loss.update(nn.functional.cross_entropy(out, y).item())
        accuracy.update((out.argmax(1) == y).sum().item(), len(y))
        for metric in (loss, accuracy):
            metric.reduce()
    return loss, accuracy


def main(epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train, held_out = loader(64, seed=1, shuffle=True), loader(96, seed=2, shuffle=False)
    for epoch in range(epochs):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss, accuracy = evaluate(model.module, held_out)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {loss.value:.3f}, accuracy {accuracy.value:.3f}", flush=True
            )
            print(f"{accuracy.count:.0f} samples evaluated", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
