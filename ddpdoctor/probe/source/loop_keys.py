"""Which key chose the tensor of a collective that is called in a loop over names:
`all_reduce(metrics[name])`, or `for name, value in metrics.items(): all_reduce(value)`; or in a
loop over parameters, which have names in their model. And where the program puts an entry of that
name into a dictionary.

Ranks that iterate in different orders then differ in the key, although the line is the same.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

from ..recording.frames import variables
from .ast_cache import (
    Defined,
    Function,
    Source,
    given,
    is_call_of,
    last_name,
    parsed_files,
    source_of,
)
from .passthrough import passes_through

KEYS = 64
"""Keys recorded per call site: each is a site of its own in the record."""
_TRIES = 4
"""Calls without a string as key after which a site is taken for a loop over something else."""
_LONGEST = 80
NOTHING_ELSE = frozenset(
    {
        "Tensor", "abs", "add", "as_tensor", "bool", "clone", "contiguous", "cpu", "cuda", "detach",
        "div", "double", "flatten", "float", "full", "get", "get_world_size", "getattr", "half",
        "int", "item", "long", "max", "mean", "min", "mul", "new_tensor", "norm", "pop", "reshape",
        "sqrt", "squeeze", "stack", "sub", "sum", "tensor", "to", "type", "unsqueeze", "view",
    }
)  # fmt: skip
"""Functions that return their argument in another form, also in its place (`div_`). Any other
function may compute a new value for each key, and may itself choose by it."""
_NOT_SENT = ("group", "async_op", "op", "src", "dst")
"""Arguments of collectives that do not choose what is sent."""
_TAKES_NAMES = ("dict", "update", "OrderedDict")
_TAKES_A_NAME = ("setdefault", "__setitem__")
_Loop: TypeAlias = ast.For | ast.comprehension


def no_name(value: Any) -> str:
    """The name of an object that has none."""
    return ""


class LoopKey:
    """A call site in a loop over names.

    Attributes:
        sites: the number of the call site with each key; name: the last key itself.
    """

    def __init__(
        self,
        code: CodeType,
        names: tuple[str, ...],
        name_of: Callable[[Any], str] = no_name,
    ) -> None:
        """
        Args:
            names: the variables of the loop.
            name_of: the name of an object that is no string; empty if it has none.
        """
        self._code = code
        self._names = names
        self._name_of = name_of
        self._tries = _TRIES
        self._again = False
        self.sites: dict[str, int] = {}
        self.name = ""

    @property
    def over(self) -> bool:
        """Whether it has shown no key, or too many, or all objects once."""
        return not self._tries or len(self.sites) > KEYS or self._again

    def key(self, frame: FrameType) -> str:
        """The key now, as `name = 'loss'`; empty if no variable of the loop is a string or has a
        name.

        Args:
            frame: the innermost frame of the user's code.
        """
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not self._code:
            outer = outer.f_back
        known: dict[str, Any] = variables(outer) if outer is not None else {}
        for name in self._names:
            if type(value := known.get(name)) is str:
                self.name = value
                return f"{name} = {value[:_LONGEST]!r}"
        for name in self._names:
            if found := self._name_of(known.get(name)):
                self.name = found
                key = f"{name} = {found[:_LONGEST]!r}"
                self._again = key in self.sites
                return "" if self._again else key
        self._tries -= not self.sites
        return ""


def keyed(frames: list[FrameType], name_of: Callable[[Any], str] = no_name) -> LoopKey | None:
    """The `LoopKey` of a call made in these frames; None if it is in no loop over names.

    Args:
        frames: of the user's code, innermost first.
        name_of: see `LoopKey`.
    """
    called = None
    for frame in frames:
        code, line = frame.f_code, frame.f_lineno
        if names := keys(code, line, called):
            return LoopKey(code, names, name_of)
        if not passes_through(code, line, called):
            break
        called = code
    return None


def keys(code: CodeType, line: int, called: CodeType | None) -> tuple[str, ...]:
    """The variables of the loops around a call that choose its arguments.

    Args:
        called: the user's function that is called on that line; None for a function of
            `torch.distributed`.
    """
    if not _may_loop(code, line):
        return ()
    source = source_of(code.co_filename)
    around = source.around(line) if source is not None else []
    calls = [n for n in around if isinstance(n, ast.Call) and is_call_of(n, called)]
    if source is None or not calls:
        return ()
    passed = given(calls[-1], but=_NOT_SENT)
    if not all(map(_is_unchanged, passed)):
        return ()
    loops = list(_loops(source, calls[-1]))
    used = {n.id for p in passed for n in ast.walk(p) if isinstance(n, ast.Name)}
    for loop in loops:
        if isinstance(loop, ast.For):
            used |= _assigned_from(used, loop, line)
    found: list[str] = []
    for loop in loops:
        names = [n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)]
        if used & {*names}:
            found += names
    return tuple(dict.fromkeys(found))


def _may_loop(code: CodeType, line: int) -> bool:
    """Whether `for` occurs between the head of the function and the end of the statement: spares
    the parsing of most files."""
    lines = linecache.getlines(code.co_filename)
    return any("for " in text for text in lines[code.co_firstlineno - 1 : line + 3])


def _loops(source: Source, call: ast.Call) -> Iterator[_Loop]:
    """The loops around a call within its own function, innermost first."""
    inner: ast.AST = call
    while (outer := source.parents.get(inner)) is not None and not isinstance(
        outer, (Function, Defined)
    ):
        if isinstance(outer, ast.For) and inner in outer.body:
            yield outer
        elif isinstance(outer, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            yield from reversed(outer.generators)
        inner = outer


def _assigned_from(used: set[str], loop: ast.For, line: int) -> set[str]:
    """The names that variables in `used` were assigned from, in the loop and above that line."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and node.lineno < line and _is_unchanged(node.value):
            targets = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if targets & used:
                found |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return found


def _is_unchanged(value: ast.AST) -> bool:
    return all(
        last_name(n.func).rstrip("_") in NOTHING_ELSE
        for n in ast.walk(value)
        if isinstance(n, ast.Call)
    )


class Setter(NamedTuple):
    file: str
    line: int
    function: str


def setter(name: str, files: Iterable[str]) -> Setter | None:
    """The only line that sets an entry of this name, as in `losses["acc"] = x`; None where there is
    none, or several.

    Args:
        files: where to look first; otherwise in those that were parsed already.
    """
    for some in (files, parsed_files()):
        found = [
            Setter(file, *line)
            for file in dict.fromkeys(some)
            if (source := source_of(file)) is not None
            for line in source.once(_setters).get(name, ())
        ]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _setters(source: Source) -> dict[str, list[tuple[int, str]]]:
    """The lines that set an entry, and their functions, by its name."""
    found: dict[str, list[tuple[int, str]]] = {}
    for node in source.nodes:
        for name, at in _entries(node):
            found.setdefault(name, []).append((at.lineno, _function_of(source, at)))
    return found


def _entries(node: ast.AST) -> list[tuple[str, ast.expr | ast.keyword]]:
    """The names of the entries that a node itself sets, each with what says so."""
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        keys = [node.slice]
    elif isinstance(node, ast.Dict):
        keys = [*node.keys]
    elif isinstance(node, ast.Call) and last_name(node.func) in _TAKES_A_NAME:
        keys = [*node.args[:1]]
    elif isinstance(node, ast.Call) and last_name(node.func) in _TAKES_NAMES:
        return [(k.arg, k) for k in node.keywords if k.arg]
    return [
        (key.value, key)
        for key in keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]


def _function_of(source: Source, node: ast.AST) -> str:
    outer: ast.AST | None = node
    while outer is not None and not isinstance(outer, Defined):
        outer = source.parents.get(outer)
    return outer.name if isinstance(outer, Defined) else "<module>"
