"""What keeps tensors alive: containers that grow with every step, or sums that keep their graph?

Used by `memory` when growth is suspected. A census of all containers takes some tens of
milliseconds; one of the user's named objects a hundredth of that.
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
from ...recording.limits import DEEPEST_NAME
from ...recording.names_in_frames import NamedObject, attributes, named
from ...source.ast_cache import Source, source_of

FEWEST = 16
"""Smaller containers do not make memory grow noticeably."""

LONG_CHAIN = 40
"""Additions that make a sum suspicious; sums of the losses of several tasks are shorter."""

MOST_PARTS, DEEPEST = 16, 2
"""Parts of a container's entry that are examined, and levels of nesting."""


_CONTAINERS = (list, dict, set, deque)

_Test = Callable[[ast.AST], bool]


@dataclass(frozen=True)
class TensorContainer:
    """A container of tensors.

    Attributes:
        length: number of entries.
        graphs: some tensor has an autograd graph.
        kind: name of its type.
        entry_bytes: size of the tensors in one entry.
    """

    length: int
    graphs: bool
    kind: str
    entry_bytes: int = 0


def census(things: Iterable[Any] | None = None) -> dict[int, TensorContainer]:
    """Containers of tensors by id, among `things` or (None) all objects that the garbage collector
    knows. Calls no code of these objects."""
    import torch

    found: dict[int, TensorContainer] = {}
    for thing in gc.get_objects() if things is None else things:
        if type(thing) in _CONTAINERS and len(thing) >= FEWEST:
            ends = [_tensors_in(entry, torch.Tensor, DEEPEST) for entry in _ends(thing)]
            tensors = next((some for some in reversed(ends) if some), None)
            if tensors is not None:
                # A tensor that the first entry holds too is shared by all: it does not add up.
                shared = {id(t) for t in ends[0]} if len(ends) > 1 else ()
                size = sum(t.numel() * t.element_size() for t in tensors if id(t) not in shared)
                graphs = any(t.grad_fn is not None for t in tensors)
                found[id(thing)] = TensorContainer(len(thing), graphs, type(thing).__name__, size)
    return found


def _tensors_in(entry: Any, kind: type, depth: int) -> list[Any]:
    """The tensors in an entry: itself, or those in a small tuple, list, dict or object."""
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


def named_objects(frame: FrameType | None, sites: Sites) -> Iterator[Any]:
    """The values of the variables of the user's running functions, and of their attributes."""
    return (one.value for one in named(frame, sites, DEEPEST))


def long_chain(frame: FrameType | None, sites: Sites) -> tuple[NamedObject | None, int]:
    """A named tensor that sums up losses together with their graphs, and the number of additions;
    (None, 0) if there is none."""
    import torch

    for one in named(frame, sites, DEEPEST_NAME):
        if issubclass(type(one.value), torch.Tensor) and one.value.grad_fn is not None:
            length = _additions(one.value.grad_fn)
            if length >= LONG_CHAIN:
                return one, length
    return None, 0


def _additions(node: Any) -> int:
    """Number of consecutive additions that made the result of this node."""
    count = 0
    while node is not None and node.name().startswith("AddBackward") and count < 1000:
        count += 1
        children = [c for c, _ in node.next_functions if c is not None]
        # Of the two inputs the old sum is an addition, the new loss is not.
        node = next((c for c in children if c.name().startswith("AddBackward")), None)
    return count


_ADDING = {"append", "appendleft", "extend", "add", "insert", "update", "setdefault"}


def adding_line(one: NamedObject, sites: Sites) -> tuple[str, int, str]:
    """File, line and function of a statement that adds to the object; the running line if none."""
    code = one.frame.f_code
    owner = one.owner or type(one.value)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    for matches in _name_tests(one.name):
        # Prefer lines in the running function to others in the file.
        lines = _adding_lines(code.co_filename, matches)
        line = min(lines, key=lambda n: (n < code.co_firstlineno, n), default=0)
        if line:
            return code.co_filename, line, lines[line]
        if file and sites.kind_of(file) == "user" and (lines := _adding_lines(file, matches)):
            return file, min(lines), lines[min(lines)]
    return code.co_filename, one.frame.f_lineno, code.co_name


def _name_tests(name: str) -> list[_Test]:
    """Tests for expressions that may mean the object called `name`: for `meter.sums["loss"]`, any
    expression ending in `["loss"]`, or else `sums[k]` for any k."""
    try:
        whole = ast.parse(name, mode="eval").body
    except SyntaxError:
        return []
    if isinstance(whole, ast.Subscript):
        keyed = partial(_ends_in_key, key=_last(whole))
        return [keyed, partial(_is_entry, of=_last(whole.value))]
    return [partial(_ends_in_name, name=_last(whole))]


def _last(node: ast.AST) -> Any:
    """The last name or constant key of an expression."""
    if isinstance(node, ast.Subscript):
        return node.slice.value if isinstance(node.slice, ast.Constant) else None
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _adding_lines(file: str, matches: _Test) -> dict[int, str]:
    """Lines of a file that add to a matching expression, with the function of each."""
    source = source_of(file)
    if source is None:
        return {}
    lines = [node.lineno for node in source.nodes if _adds(node, matches)]
    return {line: _function_of(source, line) for line in lines}


def _function_of(source: Source, line: int) -> str:
    around = source.around(line)
    names = [n.name for n in around if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return names[-1] if names else "<module>"


def _adds(node: ast.AST, matches: _Test) -> TypeGuard[ast.expr | ast.stmt]:
    if isinstance(node, ast.Call):
        call = node.func
        return isinstance(call, ast.Attribute) and call.attr in _ADDING and matches(call.value)
    if isinstance(node, ast.AugAssign):
        return matches(node.target)
    if isinstance(node, ast.Assign):
        value = node.value
        summed = isinstance(value, ast.BinOp) and (matches(value.left) or matches(value.right))
        return any(
            (isinstance(t, ast.Subscript) and matches(t.value)) or (summed and matches(t))
            for t in node.targets
        )
    return False


def _ends_in_name(node: ast.AST, name: Any) -> bool:
    """Whether an expression ends in that name: `name`, `self.name`, `x["name"]`, `name[k]`."""
    if isinstance(node, ast.Subscript):
        return _ends_in_key(node, name) or _ends_in_name(node.value, name)
    return isinstance(node, (ast.Name, ast.Attribute)) and _last(node) == name


def _ends_in_key(node: ast.AST, key: Any) -> bool:
    """Whether an expression ends in that key: `x["key"]`."""
    return isinstance(node, ast.Subscript) and key is not None and _last(node) == key


def _is_entry(node: ast.AST, of: Any) -> bool:
    """Whether an expression is an entry of a dictionary: `of[k]`, `of.setdefault(k, [])`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("get", "setdefault") and _ends_in_name(node.func.value, of)
    return isinstance(node, ast.Subscript) and _last(node) is None and _ends_in_name(node.value, of)
