"""How does a data set turn an index into a sample?

Read off the bytecode of `__getitem__` and the attributes of the object; no code of the user runs.
"""

from __future__ import annotations

import dis
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

OBJECTS = 64
"""Objects whose numbers and texts are read, including the data set."""

DEEPEST = 3
"""Nesting of these objects."""

SHAPE = 8
"""Lists of at most this length may be shapes or settings, not samples."""

_FRAMES = frozenset(("locals", "vars", "eval", "exec"))
"""Functions that may read a variable without naming it."""

ENDS = 512
"""Characters at either end of a long text that are compared."""


def at_index(dataset: Any) -> frozenset[str]:
    """Names of attributes that `__getitem__` subscripts with its index unchanged (`self.files[i]`).

    Empty if it assigns to the index variable, or if `__getitems__` may be called instead.
    """
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
        and _is_subscript(taken)
    )


def ignores_index(dataset: Any) -> bool:
    """Whether `__getitem__` never reads its index."""
    import torch.utils.data as data

    inner = innermost(dataset)
    code = getattr(getattr(type(inner), "__getitem__", None), "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 2:
        return False
    if isinstance(inner, data.IterableDataset) or hasattr(type(inner), "__getitems__"):
        return False
    index = code.co_varnames[1]
    named = any(index in _names(i) for i in dis.get_instructions(code))
    return not named and _FRAMES.isdisjoint(code.co_names)


def holds_entries(dataset: Any) -> bool:
    """Whether the data set keeps an array or list that samples may come from."""
    values = kept(innermost(dataset)).values()
    return any(
        (isinstance(v, (list, tuple, dict)) and len(v) > SHAPE) or bool(getattr(v, "shape", ()))
        for v in values
    )


def innermost(dataset: Any) -> Any:
    """The data set beneath all `Subset`s."""
    import torch.utils.data as data

    while type(dataset) is data.Subset:
        dataset = dataset.dataset
    return dataset


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Names that an instruction loads or stores; Python 3.13 has instructions with two."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]"


def kept(owner: Any) -> dict[str, Any]:
    """Attributes of an object and of its class, without those of torch's classes."""
    found: dict[str, Any] = {}
    for kind in reversed(type(owner).__mro__):
        if kind is not object and not kind.__module__.startswith(("torch.", "typing")):
            own = ((n, v) for n, v in vars(kind).items() if not n.startswith("__"))
            found.update((n, v) for n, v in own if not callable(v))
    return {**found, **getattr(owner, "__dict__", {})}


def settings(dataset: Any) -> int:
    """A checksum of the numbers and texts in a data set and the objects it holds: paths, part
    numbers and the like. Equal in all processes for equal settings; 0 if they cannot be read."""
    try:
        emitted = sorted(f"{path}={value!r}" for path, value in _plain_values(dataset))
    except Exception:  # of the user's classes
        return 0
    return zlib.crc32("\n".join(emitted).encode()) or 1


def _plain_values(dataset: Any) -> Iterator[tuple[str, object]]:
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
            if (plain := _plain_value(value)) is not None:
                yield where, plain
            elif depth < DEEPEST and _is_object(value):
                left.append((value, where, depth + 1))


def _plain_value(value: Any) -> object:
    """A short number or text for a value, equal in all processes; None for any other type."""
    if type(value) is int:
        return hash(value)  # `repr` raises for integers of too many digits
    if type(value) in (bool, float):
        return value
    if isinstance(value, PurePath):
        value = str(value)
    if type(value) not in (str, bytes):
        return None
    return value if len(value) <= 2 * ENDS else (len(value), value[:ENDS], value[-ENDS:])


def _is_object(value: Any) -> bool:
    if isinstance(value, (type, FunctionType, ModuleType)) or hasattr(type(value), "dtype"):
        return False
    return hasattr(value, "__dict__") or (type(value) is dict and len(value) <= OBJECTS)


def length(of: Any) -> int:
    try:
        return len(of)
    except Exception:  # of the user's class, which need not have one
        return -1
