"""Which locks a line of a program holds, by its source."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Iterator

from .records import Frame

_WITH = re.compile(r"with ([A-Za-z_][\w.\[\]'\"]*)\s*(?: as \w+)?:")
_ACQUIRE = re.compile(r"([A-Za-z_][\w.\[\]'\"]*)\.acquire\(")
_LONGEST = 20_000
"""Lines of a file that is read."""

MOST = 8
"""Locks of one thread."""


def waited_for(source: str) -> str:
    """What a line takes before it goes on: `lock` of `with lock:` and of `lock.acquire()`; empty
    for none. A call, as in `with open(path):`, is none."""
    found = _WITH.match(source) or _ACQUIRE.search(source)
    return found[1] if found else ""


def same(one: str, other: str) -> bool:
    """Whether two expressions name the same lock, as far as their last parts tell."""
    return one.rpartition(".")[2] == other.rpartition(".")[2]


def held(frames: Iterable[Frame]) -> tuple[str, ...]:
    """What the frames of a thread have taken and not given back."""
    return tuple(dict.fromkeys(n for f in frames for n in _around(f.file, f.line)))[:MOST]


@functools.lru_cache(maxsize=1024)
def _around(file: str, line: int) -> tuple[str, ...]:
    tree = _parsed(file)
    return tuple(_taken(tree, line)) if tree is not None else ()


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module | None:
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines)) if len(lines) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _taken(tree: ast.AST, line: int) -> Iterator[str]:
    """What is taken at a line, by the statements of the innermost function around it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    scope = tree
    for node in ast.walk(tree):  # the outer ones come first
        if isinstance(node, functions) and node.lineno <= line <= (node.end_lineno or 0):
            scope = node
    open_: dict[str, int] = {}
    for node in sorted(_own(scope), key=lambda n: getattr(n, "lineno", 0)):
        if isinstance(node, ast.With | ast.AsyncWith):
            if node.body[0].lineno <= line <= (node.end_lineno or 0):
                for item in node.items:
                    if not isinstance(item.context_expr, ast.Call):
                        yield ast.unparse(item.context_expr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func.value)
            if node.func.attr == "acquire" and node.lineno < line:
                open_[name] = node.lineno
            elif node.func.attr == "release" and node.lineno < line:
                open_.pop(name, None)
    yield from open_


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """What is inside a function, or a module, and in no function of its own."""
    below = list(ast.iter_child_nodes(scope))
    while below:
        node = below.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            below += ast.iter_child_nodes(node)
