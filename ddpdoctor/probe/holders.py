"""Finds what keeps tensors alive: containers that grow step by step, sums that drag their history.

A census of all containers takes some tens of milliseconds, and one of those that the user's code
has at hand a hundredth of that.
"""

from __future__ import annotations

import ast
import gc
import linecache
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, GetSetDescriptorType
from typing import Any

from .frames import variables
from .sites import Sites

FEWEST = 16
"""Smaller containers are not what makes memory grow."""

LONG_CHAIN = 40

MOST_PARTS, DEEPEST = 16, 2
"""Parts of an entry that are looked at, and how far down."""

_IN_PYTHON = 1 << 9
"""Flag of types that a class statement makes; others' objects have nothing to look into."""

_CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class Held:
    """A container of tensors."""

    length: int
    graphs: bool
    kind: str
    entry_bytes: int = 0


def census(things: Iterable[Any] | None = None) -> dict[int, Held]:
    """Containers of tensors among these things, or among all that there are, by id. Looks at
    objects and calls none of their code."""
    import torch

    found: dict[int, Held] = {}
    for thing in gc.get_objects() if things is None else things:
        if type(thing) in _CONTAINERS and len(thing) >= FEWEST:
            ends = [_tensors_in(entry, torch.Tensor, DEEPEST) for entry in _ends(thing)]
            tensors = next((some for some in reversed(ends) if some), None)
            if tensors is not None:
                # What the first entry has too, every entry has: it does not add up.
                shared = {id(t) for t in ends[0]} if len(ends) > 1 else ()
                size = sum(t.numel() * t.element_size() for t in tensors if id(t) not in shared)
                graphs = any(t.grad_fn is not None for t in tensors)
                found[id(thing)] = Held(len(thing), graphs, type(thing).__name__, size)
    return found


def _tensors_in(entry: Any, kind: type, depth: int) -> list[Any]:
    """The tensors of an entry: itself, or those in a small tuple, list, dict or object."""
    if issubclass(type(entry), kind):
        return [entry]
    inside = _parts(entry) if depth else ()
    return [tensor for part in inside for tensor in _tensors_in(part, kind, depth - 1)]


def _parts(entry: Any) -> list[Any]:
    made = type(entry)
    base = next((kind for kind in (tuple, list, dict) if issubclass(made, kind)), None)
    if base is None and made.__flags__ & _IN_PYTHON and not issubclass(made, type):
        own = next((vars(k)["__dict__"] for k in made.__mro__ if "__dict__" in vars(k)), None)
        if type(own) is GetSetDescriptorType:  # a property would be the user's code
            entry, base = own.__get__(entry), dict
    if base is None or base.__len__(entry) > MOST_PARTS:
        return []
    return list(dict.values(entry) if base is dict else base.__iter__(entry))


def _ends(thing: Any) -> Iterator[Any]:
    try:
        if isinstance(thing, (list, deque)):
            yield from (thing[0], thing[-1])
        elif isinstance(thing, dict):
            yield next(iter(thing.values()))
            yield next(reversed(thing.values()))
        else:
            yield next(iter(thing))
    except (IndexError, StopIteration, RuntimeError):  # changed by another thread meanwhile
        return


def at_hand(frame: FrameType | None, sites: Sites) -> Iterator[Any]:
    """What the user's running code has names for, and what that holds by name."""
    while frame is not None:
        if sites.kind(frame.f_code) == "user":
            for scope in (variables(frame), frame.f_globals):
                for name, value in list(scope.items()):
                    if name.startswith("__") or isinstance(value, (type(sys), type)):
                        continue
                    yield value
                    for held in (value, getattr(value, "__dict__", None)):
                        if type(held) is dict:
                            yield from list(held.values())
        frame = frame.f_back


def name_of(target: int, frame: FrameType | None, sites: Sites) -> tuple[str, FrameType | None]:
    """What the user's running code calls an object, and the frame that does."""
    while frame is not None:
        if sites.kind(frame.f_code) == "user":
            for scope in (variables(frame), frame.f_globals):
                name = _in_scope(target, scope)
                if name:
                    return name, frame
        frame = frame.f_back
    return "", None


def _in_scope(target: int, scope: dict[str, Any]) -> str:
    for name, value in list(scope.items()):
        if id(value) == target:
            return name
    for name, value in list(scope.items()):
        if name.startswith("__") or isinstance(value, type(sys)):
            continue
        parts = getattr(value, "__dict__", None) if not isinstance(value, type) else None
        if type(value) is dict:
            found = next((k for k, v in list(value.items()) if id(v) == target), None)
            if found is not None:
                return f"{name}[{found!r}]"
        if type(parts) is dict:
            found = next((k for k, v in list(parts.items()) if id(v) == target), None)
            if found is not None:
                return f"{name}.{found}"
    return ""


def long_chain(frame: FrameType | None, sites: Sites) -> tuple[str, FrameType | None, int]:
    """A local of the user's that sums up losses together with their graphs."""
    import torch

    while frame is not None:
        if sites.kind(frame.f_code) == "user":
            for name, value in variables(frame).items():
                if issubclass(type(value), torch.Tensor) and value.grad_fn is not None:
                    length = _additions(value.grad_fn)
                    if length >= LONG_CHAIN:
                        return name, frame, length
        frame = frame.f_back
    return "", None, 0


def _additions(node: Any) -> int:
    """How many additions one after the other made this."""
    count = 0
    while node is not None and node.name().startswith("AddBackward") and count < 1000:
        count += 1
        children = [c for c, _ in node.next_functions if c is not None]
        # The sum so far is itself an addition, the new loss is not.
        node = next((c for c in children if c.name().startswith("AddBackward")), None)
    return count


_ADDING = {"append", "appendleft", "extend", "add", "insert", "update", "setdefault"}


def line_that_grows(name: str, frame: FrameType) -> int:
    """The line of the user's file that adds to it; the line that runs where there is none."""
    last = re.split(r"[.\[]", name)[-1].strip("'\"]")
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return frame.f_lineno
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.expr, ast.stmt)) and _adds(node, last)
    ]
    # Rather in the function that runs than elsewhere in the file.
    first = frame.f_code.co_firstlineno
    return min(found, key=lambda line: (line < first, line), default=frame.f_lineno)


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        call = node.func
        return isinstance(call, ast.Attribute) and call.attr in _ADDING and _is(call.value, name)
    if isinstance(node, ast.AugAssign):
        return _is(node.target, name)
    if isinstance(node, ast.Assign):
        value = node.value
        summed = isinstance(value, ast.BinOp) and (_is(value.left, name) or _is(value.right, name))
        return any(
            (isinstance(t, ast.Subscript) and _is(t.value, name)) or (summed and _is(t, name))
            for t in node.targets
        )
    return False


def _is(node: ast.AST, name: str) -> bool:
    """Whether an expression ends in that name: `name`, `self.name`, `x["name"]`, `name[k]`."""
    if isinstance(node, ast.Name):
        return node.id == name
    if isinstance(node, ast.Attribute):
        return node.attr == name
    if isinstance(node, ast.Subscript):
        key = node.slice
        return (isinstance(key, ast.Constant) and key.value == name) or _is(node.value, name)
    return False
