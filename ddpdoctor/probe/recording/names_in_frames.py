"""Which name the user's running code has for an object: `trainer.losses`, `self.net[0].weight`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, GetSetDescriptorType
from typing import Any, NamedTuple

from .code_locations import Sites
from .frames import variables
from .limits import MOST_ENTRIES, MOST_MODULES, MOST_NAMED


class NamedObject(NamedTuple):
    """An object and an expression for it in the user's running code.

    Attributes:
        frame: where the expression holds.
        owner: the class of the object that it is an attribute of, None for a variable.
    """

    name: str
    value: Any
    frame: FrameType
    owner: type | None = None


def named(frame: FrameType | None, sites: Sites, depth: int = 1) -> Iterator[NamedObject]:
    """The objects that the user's running code has names for: variables of each frame, then their
    attributes and items, down to `depth`; the innermost frame first, shorter expressions first.

    Submodules of classes that the program defines count as near as the model that they are in.
    """
    met: dict[int, int] = {}
    while frame is not None:
        if sites.kind(frame.f_code) == "user":
            for scope in (variables(frame), frame.f_globals):
                level = [
                    NamedObject(name, value, frame)
                    for name, value in list(scope.items())
                    if not name.startswith(("__", ".")) and not isinstance(value, (type(sys), type))
                ]
                yield from level
                for left in range(depth, 0, -1):
                    level += _own_modules(level, met)
                    new = [one for one in level if met.get(id(one.value), 0) < left]
                    met.update((id(one.value), left) for one in new)
                    level = [part for one in new for part in _inside(one)]
                    yield from level
        frame = frame.f_back


def name_of(
    target: int, frame: FrameType | None, sites: Sites, depth: int = 1
) -> NamedObject | None:
    """The first name in `named` for the object whose id is `target`."""
    return next((one for one in named(frame, sites, depth) if id(one.value) == target), None)


_IN_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: set for classes made by a class statement; other objects have no
attributes of interest."""


_PLAIN = (int, float, str, bool, bytes, type(None))
"""Objects that hold nothing."""


def attributes(thing: Any) -> dict[str, Any]:
    """The attributes stored in an object, read without calling any of its code (`__getattr__`,
    properties)."""
    made = type(thing)
    if not made.__flags__ & _IN_PYTHON or issubclass(made, type):
        return {}
    own = next((vars(k)["__dict__"] for k in made.__mro__ if "__dict__" in vars(k)), None)
    return own.__get__(thing) if type(own) is GetSetDescriptorType else {}


def _inside(one: NamedObject) -> list[NamedObject]:
    held, made = one.value, type(one.value)
    if issubclass(made, dict):
        if dict.__len__(held) > MOST_NAMED:
            return []
        return [
            NamedObject(
                f"{one.name}[{k if type(k) is not str else repr(k)}]", v, one.frame, one.owner
            )
            for k, v in list(dict.items(held))
            if type(k) in (str, int)
        ]
    if issubclass(made, (list, tuple)):
        base = list if issubclass(made, list) else tuple
        if base.__len__(held) > MOST_ENTRIES:
            return []
        return [
            NamedObject(f"{one.name}[{n}]", v, one.frame, one.owner)
            for n, v in enumerate(base.__iter__(held))
            if type(v) not in _PLAIN
        ]
    if _is_torchs(made):  # its attributes are torch's own
        return []
    found = list(attributes(held).items())
    if issubclass(made, sys.modules["torch"].nn.Module):
        found = [(k, v) for k, v in found if not k.startswith("_")]  # `_modules` etc. are torch's
    return [NamedObject(f"{one.name}.{k}", v, one.frame, made) for k, v in found]


def _own_modules(level: list[NamedObject], met: dict[int, int]) -> list[NamedObject]:
    """The submodules, not met yet, that are of a class of the program rather than of torch."""
    module_type = sys.modules["torch"].nn.Module
    attributes_of = vars(module_type)["__dict__"].__get__
    below = [one for one in level if issubclass(type(one.value), module_type)]
    count = len(below)
    for module in below:
        children = attributes_of(module.value).get("_modules")
        if not issubclass(type(children), dict):  # TorchScript keeps them elsewhere
            continue
        for key, child in list(children.items()):
            fresh = id(child) not in met and issubclass(type(child), module_type)
            if fresh and len(below) < MOST_MODULES:
                name = f".{key}" if key.isidentifier() else f"[{key}]"
                met[id(child)] = 0
                below.append(NamedObject(module.name + name, child, module.frame))
    return [one for one in below[count:] if not _is_torchs(type(one.value))]


def _is_torchs(made: type) -> bool:
    return made.__module__.partition(".")[0] == "torch"
