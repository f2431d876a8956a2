"""What the running code of the user calls an object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, GetSetDescriptorType
from typing import Any, NamedTuple

from .code_locations import Sites
from .frames import variables


class NamedObject(NamedTuple):
    """Something that the user's running code can name: where, as what, and of which class it is an
    attribute."""

    name: str
    value: Any
    frame: FrameType
    owner: type | None = None


def named(frame: FrameType | None, sites: Sites, depth: int = 1) -> Iterator[NamedObject]:
    """What the user's running code has names for, and so far down what that holds by name; the
    frame's own first, and of these what is nearest. The program's own modules are as near as the
    model that they are parts of."""
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
    """What the user's running code calls an object."""
    return next((one for one in named(frame, sites, depth) if id(one.value) == target), None)


MOST_NAMED, DEEPEST_NAME = 64, 3
"""Larger dictionaries hold no single sums; how far down from a name what grows is looked for, as in
`trainer.meters["loss"].sum`."""

MOST_MODULES = 256
"""Modules that are gone through at most, from the top, in search of the program's own."""

_IN_PYTHON = 1 << 9
"""Flag of types that a class statement makes; others' objects have nothing to look into."""


def attributes(thing: Any) -> dict[str, Any]:
    """What an object holds by name, without calling any of its code."""
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
    if _is_torchs(made):  # nothing of the program's
        return []
    found = list(attributes(held).items())
    if issubclass(made, sys.modules["torch"].nn.Module):
        found = [(k, v) for k, v in found if not k.startswith("_")]  # the others are torch's
    return [NamedObject(f"{one.name}.{k}", v, one.frame, made) for k, v in found]


def _own_modules(level: list[NamedObject], met: dict[int, int]) -> list[NamedObject]:
    """The modules below models that are of a class of the program's and were not met yet."""
    module_type = sys.modules["torch"].nn.Module
    attributes_of = vars(module_type)["__dict__"].__get__
    below = [one for one in level if issubclass(type(one.value), module_type)]
    count = len(below)
    for module in below:
        children = attributes_of(module.value).get("_modules")
        if not issubclass(type(children), dict):  # TorchScript has its own way
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
