"""Does a saved checkpoint hold a part of the model, or of the optimizer's state, only?

What is passed to `torch.save` is looked through for DTensors of which this rank holds a shard, and
for optimizer states (`optimizer.state_dict()`) that lack those of some parameters.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....events import SavedPart
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Kwargs, Watcher

ENTRIES, NESTED = 20_000, 6
"""Entries of what is saved that are looked at, and how deep."""

FIRST_SAVES = 8
"""Saves of one line that are looked at; after that at powers of two."""


class SavedParts(Watcher):
    """
    Attributes:
        saves: calls of `torch.save`, by line.
    """

    lost = "checkpoints that hold a part only"

    def __init__(self) -> None:
        self.saves: Counter[int] = Counter()

    def install(self) -> None:
        import torch
        import torch.serialization

        self.around((torch.serialization, torch), "save", before=self._saves)

    def _saves(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return
        saved = args[0] if args else kwargs.get("obj")
        if not isinstance(saved, (dict, list, tuple)):
            return
        site = recorder.site()
        call, self.saves[site] = self.saves[site], self.saves[site] + 1
        if call >= FIRST_SAVES and call & (call - 1):
            return
        shards, tensors, lacking, parameters = 0, 0, 0, 0
        ranks: set[int] = set()
        for value in _within(saved, [ENTRIES], 0):
            if isinstance(value, dict):
                none, of = _without_state(value)
                lacking, parameters = lacking + none, parameters + of
            else:
                tensors += 1
                if held := _sharded_over(value):
                    shards += 1
                    ranks |= held
        if not (shards or lacking):
            return
        given = args[1] if len(args) > 1 else kwargs.get("f")
        path = os.path.realpath(given) if isinstance(given, (str, os.PathLike)) else ""
        recorder.emit(
            SavedPart(
                at=time.monotonic(),
                path=os.fsdecode(path),
                step=recorder.step,
                site=site,
                shards=shards,
                tensors=tensors,
                ranks=tuple(sorted(ranks)),
                lacking=lacking,
                parameters=parameters,
            ),
            vital=True,
        )


def _within(saved: Any, left: list[int], depth: int) -> Iterator[Any]:
    """The tensors in what is saved, and the states of optimizers."""
    if isinstance(saved, dict):
        if {"state", "param_groups"} <= saved.keys() and isinstance(saved["state"], dict):
            yield saved
        values: Any = saved.values()
    elif isinstance(saved, (list, tuple)):
        values = saved
    else:
        if _is_tensor(saved):
            yield saved
        return
    for value in values if depth < NESTED else ():
        left[0] -= 1
        if left[0] < 0:
            return
        yield from _within(value, left, depth + 1)


def _is_tensor(value: Any) -> bool:
    import torch

    return issubclass(type(value), torch.Tensor)


def _without_state(saved: dict[str, Any]) -> tuple[int, int]:
    """How many parameters of an optimizer have no state in its `state_dict`, and of how many; none
    where no parameter has one, as of SGD without momentum."""
    numbers = [n for group in saved["param_groups"] for n in group.get("params", ())]
    held = {n for n, state in saved["state"].items() if state}
    return (len(set(numbers) - held), len(numbers)) if held else (0, 0)


def _sharded_over(tensor: Any) -> frozenset[int]:
    """The global ranks that hold the shards of a DTensor together with this one; none of another
    tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    placements = getattr(tensor, "placements", ())
    own = None if mesh is None else mesh.get_coordinate()
    if own is None or not any(p.is_shard() for p in placements):
        return frozenset()
    index = tuple(slice(None) if p.is_shard() else n for p, n in zip(placements, own, strict=True))
    ranks = frozenset(int(r) for r in mesh.mesh[index].flatten().tolist())
    return ranks if len(ranks) > 1 else frozenset()
