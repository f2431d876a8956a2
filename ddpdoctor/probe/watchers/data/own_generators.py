"""Which random generators does a data set keep, and in which state are they?

A worker process gets a copy of the data set, and draws from its copy of the generator.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

from .samplers import names_used

MOST_GENERATORS = 8
MOST_DATASETS = 64
"""Data sets within a data set that are looked at."""

_SEEDING = {"seed", "manual_seed", "set_state", "setstate", "bit_generator"}
"""Names that a data set needs to choose the state of a generator."""


class OwnGenerator(NamedTuple):
    """A generator that a data set keeps as an attribute.

    Attributes:
        state: digest of its state when the data set was handed to workers.
    """

    owner: Any
    attribute: str
    generator: Any
    state: int

    @property
    def name(self) -> str:
        return f"{type(self.owner).__name__}.{self.attribute}"

    def advanced(self) -> bool:
        """Whether it is still the same generator and has left that state."""
        kept = vars(self.owner).get(self.attribute) is self.generator
        return kept and digest(self.generator) not in (None, self.state)


def own_generators(dataset: Any) -> list[OwnGenerator]:
    """The generators of a data set, and of those within it, that nothing but their draws moves:
    the class never seeds them once it was made."""
    from torch.utils.data import Dataset

    found: list[OwnGenerator] = []
    within, seen = [dataset], 0
    while within and seen < MOST_DATASETS and len(found) < MOST_GENERATORS:
        owner = within.pop(0)
        seen += 1
        torchs = type(owner).__module__.startswith("torch.utils.data")
        seeds = torchs or _seeds(type(owner))
        for name, value in getattr(owner, "__dict__", {}).items():
            several = value[:MOST_DATASETS] if type(value) in (list, tuple) else (value,)
            within += [v for v in several if isinstance(v, Dataset)]
            if not seeds and (state := digest(value)) is not None:
                found.append(OwnGenerator(owner, name, value, state))
    return found[:MOST_GENERATORS]


class OwnDraws:
    """The generators that a data set keeps for the data it loads, in itself and in what it calls
    for each sample (its transforms): which of them loading advances, and from which state on.

    Attributes:
        states: digests of the states when a batch was first looked at, of those that were advanced
            since.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.states: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def look(self) -> None:
        """Look at all of them, after a batch. A generator may be made with the first sample."""
        now = dict(_kept_generators(self.dataset))
        if not self._last:
            self._first = now
        advanced = (name for name, state in now.items() if self._last.get(name, state) != state)
        self.states |= {name: self._first[name] for name in advanced if name in self._first}
        self._last = now


def _kept_generators(dataset: Any) -> Iterator[tuple[str, int]]:
    """Names and digests of the generators that objects within a data set keep."""
    within, seen, found = [dataset], 0, 0
    while within and seen < MOST_DATASETS and found < MOST_GENERATORS:
        owner = within.pop(0)
        seen += 1
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if (state := digest(value)) is not None:
                found += 1
                yield f"{type(owner).__name__}.{name}", state
            else:
                several = value[:MOST_DATASETS] if type(value) in (list, tuple) else (value,)
                within += [v for v in several if type(v).__dictoffset__ and _is_called(v)]


def _is_called(value: Any) -> bool:
    """Whether a data set may call it, or index it, to make a sample."""
    return callable(value) or hasattr(type(value), "__getitem__")


def digest(value: Any) -> int | None:
    """A number that is equal where a generator is in the same state; None if it is no generator of
    Python, NumPy or torch (CPU)."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy.random")
    if type(value) is random.Random:
        return zlib.crc32(repr(value.getstate()).encode())
    if torch is not None and isinstance(value, torch.Generator):
        if value.device.type != "cpu":
            return None
        state = value.get_state()
        return zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()))
    if numpy is not None and type(value) is numpy.RandomState:
        return _of_words(value.get_state(legacy=False))
    if numpy is not None and type(value) is numpy.Generator:
        return _of_words(value.bit_generator.state)
    return None


def _of_words(state: Any) -> int:
    """A digest of NumPy's state: dictionaries of numbers and arrays."""
    if isinstance(state, dict):
        return zlib.crc32(repr([(key, _of_words(state[key])) for key in sorted(state)]).encode())
    return zlib.crc32(state.tobytes() if hasattr(state, "tobytes") else repr(state).encode())


def _seeds(kind: type) -> bool:
    """Whether a data set chooses the state of a generator after it was made."""
    methods = {
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and name not in ("__init__", "__setstate__")
    }
    return any(not _SEEDING.isdisjoint(names_used(kind, name)) for name in methods)
