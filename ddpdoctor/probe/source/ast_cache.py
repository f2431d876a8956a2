"""The user's files, each parsed once and walked once: what stands in them, and where."""

from __future__ import annotations

import ast
import linecache
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

LINES_LIMIT = 20_000
FILES_LIMIT = 64
"""So many files are remembered: a tree takes some ten times the memory of its text."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """A file of source.

    Attributes:
        tree: all of it.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._functions: dict[tuple[str, int], ast.AST | None] = {}
        self._parts: dict[ast.AST, list[ast.AST]] = {}
        self._found: dict[Callable[[Source], Any], Any] = {}

    def once(self, find: Callable[[Source], T]) -> T:
        """What a function finds in this file, which it reads when it is asked first."""
        if find not in self._found:
            self._found[find] = find(self)
        found: T = self._found[find]
        return found

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """What `ast.walk` gives for a node of the file."""
        parts = self._parts.get(node)
        if parts is None:
            parts = self._parts[node] = list(ast.walk(node))
        return parts

    @property
    def nodes(self) -> list[ast.AST]:
        """The same for the whole file."""
        return self.parts(self.tree)

    @cached_property
    def given(self) -> Given:
        return Given(self)

    @cached_property
    def defined(self) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Functions and methods by name."""
        found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.name, []).append(node)
        return found

    def around(self, line: int) -> list[ast.AST]:
        """What stands on a line or around it, in the order of `ast.walk`: outer nodes first."""
        found: list[ast.AST] = [self.tree]
        for node in found:
            found += [child for child in ast.iter_child_nodes(node) if holds(child, line)]
        return found

    def function(self, code: CodeType) -> ast.AST | None:
        """The definition that a code object was compiled from; the whole for a module's code."""
        if code.co_name == "<module>":
            return self.tree
        key = code.co_name, code.co_firstlineno
        if key not in self._functions:
            self._functions[key] = self._function(*key)
        return self._functions[key]

    def _function(self, name: str, first: int) -> ast.AST | None:
        found = [
            node
            for node in self.around(first)
            if isinstance(node, Function)
            and getattr(node, "name", "<lambda>") == name
            and _first_line(node) == first
        ]
        return found[-1] if found else None


class Given:
    """How often a file gives a name something.

    Attributes:
        names: to variables of this name; `attributes`: to attributes of any object.
        arguments: functions have a parameter of this name.
        declared: `global` or `nonlocal` somewhere.
        lasting: by a statement outside of functions, branches and loops.
    """

    def __init__(self, source: Source) -> None:
        self.names: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.arguments: Counter[str] = Counter()
        self.declared: set[str] = set()
        for node in source.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.attributes[node.attr] += 1
            elif isinstance(node, ast.arg):
                self.arguments[node.arg] += 1
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                self.declared.update(node.names)
        self.lasting = {
            node.id
            for statement in source.tree.body
            if isinstance(statement, (ast.Assign, ast.AnnAssign))
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }


def holds(node: ast.AST, line: int) -> bool:
    """Whether a line is one of those of a node; of what has none itself, a list of parameters say,
    it may be."""
    return _first_line(node, line) <= line <= (getattr(node, "end_lineno", None) or line)


def _first_line(node: ast.AST, unknown: int = 0) -> int:
    """That of the first decorator, where there is one."""
    first: int = getattr(node, "lineno", unknown)
    if isinstance(node, Defined) and node.decorator_list:
        return min(first, *(d.lineno for d in node.decorator_list))
    return first


_known: dict[str, tuple[list[str], Source | None]] = {}


def source_of(file: str) -> Source | None:
    """A file, or None where there is no (sane) source. It is parsed anew only where its text has
    become another one: a notebook runs a changed file again under the same name."""
    lines = linecache.getlines(file)
    if not lines:
        return None
    known = _known.get(file)
    # The same list as a rule: only then are the lines not compared.
    if known is None or (known[0] is not lines and known[0] != lines):
        known = _known[file] = lines, _parsed(lines)
        if len(_known) > FILES_LIMIT:
            _known.pop(next(iter(_known)), None)
    return known[1]


def _parsed(lines: list[str]) -> Source | None:
    if len(lines) > LINES_LIMIT:
        return None
    try:
        return Source(ast.parse("".join(lines)))
    except (SyntaxError, ValueError, RecursionError):
        return None
