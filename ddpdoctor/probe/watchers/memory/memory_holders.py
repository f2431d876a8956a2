"""Finds what keeps tensors alive: containers that grow step by step, sums that drag their history.

A census of all containers takes some tens of milliseconds, and one of those that the user's code
has at hand a hundredth of that.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeGuard

from ...recording.code_locations import Sites
from ...recording.names_in_frames import DEEPEST_NAME, NamedObject, attributes, named
from ...source.ast_cache import Source, source_of

FEWEST = 16
"""Smaller containers are not what makes memory grow."""

LONG_CHAIN = 40

MOST_PARTS, DEEPEST = 16, 2
"""Parts of an entry that are looked at, and how far down."""


_CONTAINERS = (list, dict, set, deque)

_Test = Callable[[ast.AST], bool]


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
    if base is None:
        entry, base = attributes(entry), dict
    if base.__len__(entry) > MOST_PARTS:
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
    return (one.value for one in named(frame, sites, DEEPEST))


def long_chain(frame: FrameType | None, sites: Sites) -> tuple[NamedObject | None, int]:
    """What sums up losses together with their graphs, and how many."""
    import torch

    for one in named(frame, sites, DEEPEST_NAME):
        if issubclass(type(one.value), torch.Tensor) and one.value.grad_fn is not None:
            length = _additions(one.value.grad_fn)
            if length >= LONG_CHAIN:
                return one, length
    return None, 0


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


def place_that_grows(one: NamedObject, sites: Sites) -> tuple[str, int, str]:
    """File, line and function of what adds to it; the line that runs where there is none."""
    code = one.frame.f_code
    owner = one.owner or type(one.value)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    for is_it in _ways_to_say(one.name):
        # Rather in the function that runs than elsewhere in the file.
        lines = _that_add(code.co_filename, is_it)
        line = min(lines, key=lambda n: (n < code.co_firstlineno, n), default=0)
        if line:
            return code.co_filename, line, lines[line]
        if file and sites.kind_of(file) == "user" and (lines := _that_add(file, is_it)):
            return file, min(lines), lines[min(lines)]
    return code.co_filename, one.frame.f_lineno, code.co_name


def _ways_to_say(name: str) -> list[_Test]:
    """What tells the expressions that may be meant where something is called `name`:
    `meter.sums["loss"]` may be anyone's `["loss"]`, or `sums[k]` for every k."""
    try:
        whole = ast.parse(name, mode="eval").body
    except SyntaxError:
        return []
    if isinstance(whole, ast.Subscript):
        keyed = partial(_is_keyed, key=_last(whole))
        return [keyed, partial(_is_entry, of=_last(whole.value))]
    return [partial(_is, name=_last(whole))]


def _last(node: ast.AST) -> Any:
    """The name or key that an expression ends in."""
    if isinstance(node, ast.Subscript):
        return node.slice.value if isinstance(node.slice, ast.Constant) else None
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _that_add(file: str, is_it: _Test) -> dict[int, str]:
    """The lines of a file that add to something, and the function of each."""
    source = source_of(file)
    if source is None:
        return {}
    lines = [node.lineno for node in source.nodes if _adds(node, is_it)]
    return {line: _function_of(source, line) for line in lines}


def _function_of(source: Source, line: int) -> str:
    around = source.around(line)
    names = [n.name for n in around if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return names[-1] if names else "<module>"


def _adds(node: ast.AST, is_it: _Test) -> TypeGuard[ast.expr | ast.stmt]:
    if isinstance(node, ast.Call):
        call = node.func
        return isinstance(call, ast.Attribute) and call.attr in _ADDING and is_it(call.value)
    if isinstance(node, ast.AugAssign):
        return is_it(node.target)
    if isinstance(node, ast.Assign):
        value = node.value
        summed = isinstance(value, ast.BinOp) and (is_it(value.left) or is_it(value.right))
        return any(
            (isinstance(t, ast.Subscript) and is_it(t.value)) or (summed and is_it(t))
            for t in node.targets
        )
    return False


def _is(node: ast.AST, name: Any) -> bool:
    """Whether an expression ends in that name: `name`, `self.name`, `x["name"]`, `name[k]`."""
    if isinstance(node, ast.Subscript):
        return _is_keyed(node, name) or _is(node.value, name)
    return isinstance(node, (ast.Name, ast.Attribute)) and _last(node) == name


def _is_keyed(node: ast.AST, key: Any) -> bool:
    """Whether an expression ends in that key: `x["key"]`."""
    return isinstance(node, ast.Subscript) and key is not None and _last(node) == key


def _is_entry(node: ast.AST, of: Any) -> bool:
    """Whether an expression is some entry of a dictionary: `of[k]`, `of.setdefault(k, [])`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("get", "setdefault") and _is(node.func.value, of)
    return isinstance(node, ast.Subscript) and _last(node) is None and _is(node.value, of)
