"""Training loops to measure, as users write them. Run by overhead.py and peers.py under torchrun.

With `switch`, an examined run goes without the doctor's hooks for every other `WINDOW` steps: two
runs on a busy machine differ by more than the doctor costs, two windows of one run do not. With
`traceml`, steps are marked as TraceML asks for.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 20
SETTLING = 2
"""Steps after a switch that are not counted."""

Batch = tuple[Tensor, Tensor]


def mlp() -> tuple[nn.Module, Callable[[], Batch]]:
    """A tiny network: what the doctor costs per step, whatever the model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, lambda: (torch.randn(32, 64), torch.randint(10, (32,)))


def tensors() -> tuple[nn.Module, Callable[[], Batch]]:
    """A thousand parameter tensors: what it costs per tensor."""
    layers = [nn.Linear(48, 48) for _ in range(499)]
    return nn.Sequential(*layers, nn.Linear(48, 10)), lambda: (
        torch.randn(64, 48),
        torch.randint(10, (64,)),
    )


class Transformer(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))).flatten(0, 1)


def transformer() -> tuple[nn.Module, Callable[[], Batch]]:
    """A small transformer."""

    def batch() -> Batch:
        tokens = torch.randint(1000, (8, 65))
        return tokens[:, :-1], tokens[:, 1:].flatten()

    return Transformer(), batch


def conv() -> tuple[nn.Module, Callable[[], Batch]]:
    """Convolutions with BatchNorm, fed by a DataLoader."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    data = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,)))
    sampler: DistributedSampler[Batch] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    def batches() -> Iterator[Batch]:
        for epoch in range(1 << 30):
            sampler.set_epoch(epoch)
            yield from loader

    stream = batches()
    return model, lambda: next(stream)


LOOPS = {"mlp": mlp, "tensors": tensors, "transformer": transformer, "conv": conv}


class Switch:
    """Takes the doctor out of every other window of steps, and counts them apart."""

    def __init__(self) -> None:
        from ddpdoctor.probe.recording import recorder

        self._probe = recorder
        self._active = recorder.current_recorder()
        self.told: dict[str, list[float]] = {"with": [], "without": []}

    def before(self, step: int) -> None:
        if step % WINDOW == 0:
            self._probe.set_recorder(self._active if step // WINDOW % 2 else None)

    def after(self, step: int, seconds: float) -> None:
        if step % WINDOW >= SETTLING:
            self.told["with" if step // WINDOW % 2 else "without"].append(seconds)

    def over(self) -> None:
        self._probe.set_recorder(self._active)


def marked(model: nn.Module, how: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context for each step of a tool that needs one."""
    if how != "traceml":
        return nullcontext
    import traceml_ai

    traceml_ai.init(mode="auto")
    return lambda: traceml_ai.trace_step(model)


def main(name: str, steps: int, path: str, how: str, after: int, device: str) -> None:
    """Count `steps` of a loop, once `after` have been taken. On a GPU each ends with its loss."""
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module, batch = LOOPS[name]()
    model = DDP(module.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wall, cpu = [], []
    switch = Switch() if how == "switch" else None
    step_context = marked(model, how)
    for step in range(-after, steps):
        if switch and step >= 0:
            switch.before(step)
        began, busy = time.perf_counter(), time.thread_time()
        with step_context():
            inputs, targets = batch()
            if device != "cpu":
                inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if device != "cpu":
                loss.item()
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - busy)
        if switch and step >= 0:
            switch.after(step, cpu[-1])
    if switch:
        switch.over()
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.cpu().numpy().tobytes())
    if rank == 0:
        with open(path, "w") as file:
            told = {"wall": wall[after:], "cpu": cpu[after:], "weights": weights.hexdigest()}
            json.dump(told | (switch.told if switch else {}), file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
