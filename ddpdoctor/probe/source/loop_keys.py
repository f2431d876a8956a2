"""By which key what a call sends was chosen, where it is made in a loop over names:
`all_reduce(metrics[name])`, or any part of `for name, value in metrics.items()`."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias

from ..recording.frames import variables
from .ast_cache import holds, source_of
from .passthrough import passes_through
from .source_text import last_name

KEYS = 64
"""So many of one place are told apart."""
_TRIES = 4
"""So often a place that names nothing is looked at."""
_LONGEST = 80
NOTHING_ELSE = frozenset(
    {
        "Tensor", "as_tensor", "clone", "contiguous", "cpu", "cuda", "detach", "div", "double",
        "flatten", "float", "full", "get", "getattr", "half", "int", "item", "long", "mean",
        "new_tensor", "pop", "reshape", "squeeze", "stack", "sum", "tensor", "to", "unsqueeze",
        "view",
    }
)  # fmt: skip
"""Functions whose result is what they are given, in another form: a call of any other may compute
something anew for each key."""
_APART = ("group", "async_op", "op", "src", "dst")
"""Arguments that say nothing of what is sent."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Loop: TypeAlias = ast.For | ast.comprehension


class LoopKey:
    """A place that communicates in a loop over names.

    Attributes:
        sites: key to the number of the place with it.
    """

    def __init__(self, code: CodeType, names: tuple[str, ...]) -> None:
        self._code = code
        self._names = names
        self._tries = _TRIES
        self.sites: dict[str, int] = {}

    @property
    def over(self) -> bool:
        """Whether there is nothing to be learned from it, or too much."""
        return not self._tries or len(self.sites) > KEYS

    def key(self, frame: FrameType) -> str:
        """`name = 'loss'` where the frame, or a caller of it, says so; else empty."""
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not self._code:
            outer = outer.f_back
        known: dict[str, Any] = variables(outer) if outer is not None else {}
        for name in self._names:
            if type(value := known.get(name)) is str:
                return f"{name} = {value[:_LONGEST]!r}"
        self._tries -= not self.sites
        return ""


def keyed(frames: list[FrameType]) -> LoopKey | None:
    """What is to be asked for the key of a call made there, None where it has none.

    Args:
        frames: the user's, innermost first.
    """
    called = None
    for frame in frames:
        code, line = frame.f_code, frame.f_lineno
        if names := keys(code, line, called):
            return LoopKey(code, names)
        if not passes_through(code, line, called):
            break
        called = code
    return None


def keys(code: CodeType, line: int, called: CodeType | None) -> tuple[str, ...]:
    """The variables of the loops around a call that choose what it passes.

    Args:
        called: as in `handed.hands_on`.
    """
    if not _may_loop(code, line):
        return ()
    way = _way_to_call(code.co_filename, line, called)
    if not way:
        return ()
    call = way[-1]
    assert isinstance(call, ast.Call)
    passed = [*call.args, *(k.value for k in call.keywords if k.arg not in _APART)]
    if not all(map(_as_it_is, passed)):
        return ()
    loops = list(_loops(way))
    used = {n.id for p in passed for n in ast.walk(p) if isinstance(n, ast.Name)}
    for loop in loops:
        if isinstance(loop, ast.For):
            used |= _made_of(used, loop, line)
    found: list[str] = []
    for loop in loops:
        names = [n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)]
        if used & {*names}:
            found += names
    return tuple(dict.fromkeys(found))


def _may_loop(code: CodeType, line: int) -> bool:
    """Whether the function (or module) says `for` before the end of the statement on that line."""
    lines = linecache.getlines(code.co_filename)
    return any("for " in text for text in lines[code.co_firstlineno - 1 : line + 3])


def _way_to_call(file: str, line: int, called: CodeType | None) -> list[ast.AST]:
    """The call on that line and what it is in, outermost first; nothing where it is not known."""
    source = source_of(file)
    found = [] if source is None else list(_calls(source.tree, [], line, _named(called)))
    return found[-1] if found else []


def _named(called: CodeType | None) -> frozenset[str]:
    if called is None:
        return frozenset(vars(sys.modules["torch.distributed"]))
    return frozenset({called.co_name})


def _calls(
    node: ast.AST, way: list[ast.AST], line: int, names: frozenset[str]
) -> Iterator[list[ast.AST]]:
    way = [*way, node]
    if isinstance(node, ast.Call) and last_name(node.func) in names:
        yield way
    for child in ast.iter_child_nodes(node):
        if holds(child, line):
            yield from _calls(child, way, line, names)


def _loops(way: list[ast.AST]) -> Iterator[_Loop]:
    """Those around the call in its own function, innermost first."""
    for outer, inner in zip(way[-2::-1], way[:0:-1], strict=True):
        if isinstance(outer, _FUNCTIONS):
            return
        if isinstance(outer, ast.For) and inner in outer.body:
            yield outer
        elif isinstance(outer, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            yield from reversed(outer.generators)


def _made_of(used: set[str], loop: ast.For, line: int) -> set[str]:
    """What the variables that are used were made of in the loop, above that line."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and node.lineno < line and _as_it_is(node.value):
            targets = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if targets & used:
                found |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return found


def _as_it_is(value: ast.AST) -> bool:
    return all(
        last_name(n.func) in NOTHING_ELSE for n in ast.walk(value) if isinstance(n, ast.Call)
    )
