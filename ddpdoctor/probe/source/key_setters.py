"""Where the program puts an entry with a certain name into a dictionary."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from .ast_cache import Defined, Source, last_name, parsed_files, source_of

_TAKES_NAMES = ("dict", "update", "OrderedDict")
_TAKES_A_NAME = ("setdefault", "__setitem__")


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
        for name, at in _names(node):
            found.setdefault(name, []).append((at.lineno, _function(source, at)))
    return found


def _names(node: ast.AST) -> list[tuple[str, ast.expr | ast.keyword]]:
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


def _function(source: Source, node: ast.AST) -> str:
    outer: ast.AST | None = node
    while outer is not None and not isinstance(outer, Defined):
        outer = source.parents.get(outer)
    return outer.name if isinstance(outer, Defined) else "<module>"
