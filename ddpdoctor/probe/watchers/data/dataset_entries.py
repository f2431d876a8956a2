"""How a data set makes a sample of what it holds: by the entry at its index, and by what else."""

from __future__ import annotations

import dis
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

OBJECTS = 64
"""Objects of which the numbers and texts are looked at, the data set among them."""

DEEPEST = 3

SHAPE = 8
"""Entries of a list that may be no more than a shape or a few settings."""

_FRAMES = frozenset(("locals", "vars", "eval", "exec"))
"""Functions that may read a variable without naming it."""

ENDS = 512
"""Characters at either end of a long text that are looked at."""


def at_index(dataset: Any) -> frozenset[str]:
    """The attributes of which its `__getitem__` takes the entry at the very index that it is given:
    `self.files[i]`. Empty where it may put another number in its place."""
    import torch.utils.data as data

    if type(dataset) is data.Subset:
        return frozenset(("dataset", "indices"))
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 2:
        return frozenset()
    if hasattr(type(dataset), "__getitems__"):
        return frozenset()
    this, index = code.co_varnames[:2]
    done = list(dis.get_instructions(code))
    if any("STORE" in i.opname and index in _names(i) for i in done):
        return frozenset()
    return frozenset(
        held.argval
        for owner, held, key, taken in zip(done, done[1:], done[2:], done[3:], strict=False)
        if held.opname == "LOAD_ATTR"
        and _names(owner)[-1] == this
        and _names(key) == (index,)
        and _takes(taken)
    )


def ignores_index(dataset: Any) -> bool:
    """Whether its `__getitem__` never looks at the index that it is given."""
    import torch.utils.data as data

    innermost = _innermost(dataset)
    code = getattr(getattr(type(innermost), "__getitem__", None), "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 2:
        return False
    if isinstance(innermost, data.IterableDataset) or hasattr(type(innermost), "__getitems__"):
        return False
    index = code.co_varnames[1]
    named = any(index in _names(i) for i in dis.get_instructions(code))
    return not named and _FRAMES.isdisjoint(code.co_names)


def holds_entries(dataset: Any) -> bool:
    """Whether it keeps an array or a list that samples may be taken from, and not only numbers."""
    values = kept(_innermost(dataset)).values()
    return any(
        (isinstance(v, (list, tuple, dict)) and len(v) > SHAPE) or bool(getattr(v, "shape", ()))
        for v in values
    )


def _innermost(dataset: Any) -> Any:
    """What a `Subset`, or a `Subset` of one, is taken from."""
    import torch.utils.data as data

    while type(dataset) is data.Subset:
        dataset = dataset.dataset
    return dataset


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Some versions of Python load or store two names at once."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


def _takes(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]"


def kept(owner: Any) -> dict[str, Any]:
    """Its attributes, and those of its class unless that is torch's."""
    found: dict[str, Any] = {}
    for kind in reversed(type(owner).__mro__):
        if kind is not object and not kind.__module__.startswith(("torch.", "typing")):
            own = ((n, v) for n, v in vars(kind).items() if not n.startswith("__"))
            found.update((n, v) for n, v in own if not callable(v))
    return {**found, **getattr(owner, "__dict__", {})}


def settings(dataset: Any) -> int:
    """A number for the numbers and texts that a data set and the objects beneath it keep, the same
    in every process: where its files lie, which part of them it is. 0 where that cannot be read."""
    try:
        emitted = sorted(f"{path}={value!r}" for path, value in _plain(dataset))
    except Exception:  # of the user's classes
        return 0
    return zlib.crc32("\n".join(emitted).encode()) or 1


def _plain(dataset: Any) -> Iterator[tuple[str, object]]:
    known: set[int] = set()
    left = [(dataset, "", 0)]
    while left and len(known) < OBJECTS:
        owner, path, depth = left.pop(0)
        if id(owner) in known:
            continue
        known.add(id(owner))
        for name, value in (dict(owner) if isinstance(owner, dict) else kept(owner)).items():
            if not isinstance(name, str):
                continue
            where = f"{path}.{name}"
            if (said := _said(value)) is not None:
                yield where, said
            elif depth < DEEPEST and _looked_into(value):
                left.append((value, where, depth + 1))


def _said(value: Any) -> object:
    """A number or a text, short and the same in every process; None for anything else."""
    if type(value) is int:
        return hash(value)  # it may have more digits than can be written
    if type(value) in (bool, float):
        return value
    if isinstance(value, PurePath):
        value = str(value)
    if type(value) not in (str, bytes):
        return None
    return value if len(value) <= 2 * ENDS else (len(value), value[:ENDS], value[-ENDS:])


def _looked_into(value: Any) -> bool:
    if isinstance(value, (type, FunctionType, ModuleType)) or hasattr(type(value), "dtype"):
        return False
    return hasattr(value, "__dict__") or (type(value) is dict and len(value) <= OBJECTS)
