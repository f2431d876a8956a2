"""Answers to small questions about the user's source: which `if` decides a use, whether a line is
quoted, where variables are set. Read only after something was found wrong."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from ..recording.environment import PREFIXES
from .ast_cache import called_name, function_of, parts_of, source_of


def branch_around(module: Any, attribute: str) -> tuple[CodeType, int] | None:
    """The `if`, in a method of a module's class, that decides whether `self.<attribute>` is used:
    its code object and line; None if there is none."""
    for kind in type(module).__mro__:
        for method in vars(kind).values():
            code = getattr(method, "__code__", None)
            if code is None or code.co_name == "__init__" or attribute not in code.co_names:
                continue
            node = function_of(code)
            line = _deciding_line(node, attribute) if node is not None else None
            if line is not None:
                return code, line
    return None


def always_mentioned(kinds: Iterable[type], attribute: str) -> bool:
    """Whether the `forward` of a class, or a method that it calls, mentions an attribute outside of
    an `if`."""
    for kind in kinds:
        reached, left = set[str](), ["forward"]
        while left:
            reached.add(name := left.pop())
            method = inspect.getattr_static(kind, name, None)
            code = getattr(getattr(method, "fget", method), "__code__", None)
            node = function_of(code) if code is not None else None
            for part, around in _with_branches(node, _Around()) if node is not None else ():
                if isinstance(part, ast.Attribute):
                    if part.attr == attribute and not around.branches:
                        return True
                    if part.attr not in reached:
                        left.append(part.attr)
    return False


def call_named(module: Any, names: tuple[str, ...]) -> tuple[CodeType, int] | None:
    """Where a method of a module's class calls a function of one of these names; None if it does
    not."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch."):
            continue
        for method in vars(kind).values():
            code = getattr(method, "__code__", None)
            if code is None or not set(names) & set(code.co_names):
                continue
            for call in parts_of(code):
                if isinstance(call, ast.Call) and called_name(call) in names:
                    return code, call.lineno
    return None


def quoted(file: str, line: int) -> bool:
    """Whether a line is a comment, or part of a string that stands by itself, such as a
    docstring."""
    if linecache.getline(file, line).lstrip().startswith("#"):
        return True
    source = source_of(file)
    return any(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in (source.around(line) if source is not None else ())
    )


def only_opens(code: CodeType, line: int) -> bool:
    """Whether a statement opens a file and closes it at once: it only creates or touches it."""
    if not linecache.getline(code.co_filename, line).lstrip().startswith(("with ", "open(")):
        return False
    source = source_of(code.co_filename)
    for node in source.around(line) if source is not None else ():
        if isinstance(node, ast.With) and node.lineno == line:
            return len(node.items) == 1 and _is_open(node.items[0].context_expr) and all(
                isinstance(n, ast.Pass)
                or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
                for n in node.body
            )  # fmt: skip
        if isinstance(node, ast.Expr) and node.lineno == line and isinstance(node.value, ast.Call):
            closes = node.value.func
            return (
                isinstance(closes, ast.Attribute)
                and closes.attr == "close"
                and _is_open(closes.value)
            )
    return False


def _is_open(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and called_name(node) == "open"


# An `if` around the use decides; else one in a loop around it that continues or breaks; else one
# above it that returns.
def _deciding_line(function: ast.AST, attribute: str) -> int | None:
    leaving: int | None = None
    passing: dict[int, int] = {}
    for node, around in _with_branches(function, _Around()):
        if isinstance(node, ast.For) and _mentions(node.iter, attribute):
            if (line := _deciding_in_loop(node)) is not None:
                return line
        elif isinstance(node, ast.Attribute) and node.attr == attribute:
            if around.branches:
                return around.branches[-1]
            return next((passing[n] for n in reversed(around.loops) if n in passing), leaving)
        elif around.branches:
            if isinstance(node, ast.Return) and leaving is None:
                leaving = around.branches[-1]
            elif isinstance(node, (ast.Continue, ast.Break)) and around.loops:
                passing[around.loops[-1]] = around.branches[-1]
    return None


def _mentions(node: ast.AST, attribute: str) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == attribute for n in ast.walk(node))


def _deciding_in_loop(loop: ast.For) -> int | None:
    """The line of the `if` in `for layer in self.layers: if skip: continue`, or in
    `for ...: if keep: x = layer(x)`."""
    names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for node in ast.walk(loop):
        if not isinstance(node, ast.If):
            continue
        inside = [n for part in (*node.body, *node.orelse) for n in ast.walk(part)]
        leaves = any(isinstance(n, (ast.Continue, ast.Break)) for n in inside)
        calls = any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in names
            for n in inside
        )
        if leaves or calls:
            return node.test.lineno
    return None


def _asks_for_training(test: ast.expr) -> bool:
    """Whether a condition is just `self.training` or `not self.training`."""
    asked = test.operand if isinstance(test, ast.UnaryOp) else test
    return isinstance(asked, ast.Attribute) and asked.attr == "training"


class _Around(NamedTuple):
    """The lines of the `if`s and loops around a node, outermost first.

    Without `if self.training`: all ranks are in training together.
    """

    branches: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()


def _with_branches(node: ast.AST, around: _Around) -> Iterator[tuple[ast.AST, _Around]]:
    """Every node below a node, in order of the text, with its `_Around`."""
    for field, value in ast.iter_fields(node):
        inner = around
        if isinstance(node, (ast.If, ast.IfExp)) and field in ("body", "orelse"):
            if not _asks_for_training(node.test):
                inner = around._replace(branches=(*around.branches, node.test.lineno))
        elif isinstance(node, (ast.For, ast.While)) and field == "body":
            inner = around._replace(loops=(*around.loops, node.lineno))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, inner
                yield from _with_branches(child, inner)


_SETS = re.compile(
    r"""environ\s*\[\s*["'](\w+)["']\s*\]\s*=(?!=)|(?:environ\.setdefault|putenv)\(\s*["'](\w+)["']"""
)
"""Matches a line that sets an environment variable, and its name."""


def lines_that_set(files: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Where files set environment variables of interest (`PREFIXES`): (file, line) by name."""
    found: dict[str, tuple[str, int]] = {}
    for file in files:
        for number, line in enumerate(linecache.getlines(file), 1):
            for match in _SETS.finditer(line) if "environ" in line or "putenv" in line else ():
                name = match[1] or match[2]
                if name.startswith(PREFIXES) and not quoted(file, number):
                    found.setdefault(name, (file, number))
    return found
