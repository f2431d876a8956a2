"""Where the source computes something that differs between processes although the data is the same:
`hash()` of a text, the order of a set, a list that is shuffled, files as their folder has them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from ..recording.code_locations import classify
from .ast_cache import Source, last_name, source_of

KEEP_ORDER = frozenset(("dict", "enumerate", "list", "tuple", "zip"))
"""Functions whose result has the order of their argument."""

ORDERLESS = frozenset(("all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum"))
"""Functions whose result does not depend on the order of their argument."""

SHUFFLES = frozenset(("permutation", "randperm", "sample", "shuffle"))
"""Functions that draw an order; with a `generator`, or a `seed`, the program chooses it."""

LISTS = frozenset(("glob", "iglob", "iterdir", "listdir", "rglob", "scandir", "walk"))
"""Functions that list files in the order of the file system."""

MOST = 4
"""Lines of each kind that are told."""


class Place(NamedTuple):
    """A line on which something differs between processes; `how` is `hash`, `set`, `shuffle` or
    `listing`."""

    how: str
    file: str
    line: int


def places(kind: type, files: Iterable[str]) -> list[Place]:
    """Such lines: those of a class and its bases first, then others of the program's files."""
    found: dict[Place, None] = {}
    names: set[str] = set()
    for base in kind.__mro__:
        spot = _lines_of(base)
        if spot is not None:
            file, lines, used = spot
            names |= used
            found.update((p, None) for p in _of_file(file) if p.line in lines)
    for file in files:
        # A hash in a function that the class does not name may serve anything else.
        found.update((p, None) for p in _of_file(file) if p.how != "hash" or _used(p, names))
    kinds = dict.fromkeys(place.how for place in found)
    return [p for how in kinds for p in [p for p in found if p.how == how][:MOST]]


def _used(place: Place, names: set[str]) -> bool:
    """Whether a line is in no function, or in one of these names; any is where there are none."""
    source = source_of(place.file)
    around = source.around(place.line) if source is not None else []
    functions = [n.name for n in around if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    return not names or not functions or not names.isdisjoint(functions)


def _lines_of(kind: type) -> tuple[str, range, set[str]] | None:
    """The file of a class of the user's, its lines, and the names that its methods read; None where
    they are not known."""
    codes = [c for v in vars(kind).values() if (c := getattr(v, "__code__", None)) is not None]
    if not codes or classify(file := codes[0].co_filename) != "user":
        return None
    try:
        lines, first = inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    return file, range(first, first + len(lines)), {n for c in codes for n in _names(c)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_file(file: str) -> list[Place]:
    source = source_of(file)
    return [Place(how, file, line) for how, line in source.once(_found)] if source else []


def _found(source: Source) -> list[tuple[str, int]]:
    sets = {
        ast.unparse(node.targets[0])
        for node in source.nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_set(node.value, set())
    }
    found: list[tuple[bool, int, str]] = []
    for node in source.nodes:
        loop = isinstance(node, ast.For)
        if _called(node) == "hash" and not _within_hash(source, node):
            found.append((loop, node.lineno, "hash"))  # type: ignore[attr-defined]
        elif _keeps_order_of_set(node, sets) and not _order_is_lost(source, node):
            at: Any = node.iter if isinstance(node, ast.comprehension) else node
            found.append((loop, at.lineno, "set"))
        elif isinstance(node, ast.Call) and (how := _draws_or_lists(source, node)):
            found.append((True, node.lineno, how))
    # A loop over a set seldom numbers its elements.
    return [(how, line) for _, line, how in sorted(found)]


def _called(node: ast.AST) -> str:
    """The name of the function that a node calls by a plain name."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if called else ""  # type: ignore[attr-defined]


def _draws_or_lists(source: Source, node: ast.Call) -> str:
    """`shuffle` or `listing`, empty for other calls, and where the order is set afterwards."""
    name = last_name(node.func)
    if name in LISTS:
        return "" if _order_is_lost(source, node) else "listing"
    seeded = any(k.arg in ("generator", "seed", "random_state") for k in node.keywords)
    return "shuffle" if name in SHUFFLES and not seeded else ""


def _within_hash(source: Source, node: ast.AST | None) -> bool:
    while node is not None:
        if isinstance(node, ast.FunctionDef) and node.name == "__hash__":
            return True
        node = source.parents.get(node)
    return False


def _is_set(node: ast.AST, named: set[str]) -> bool:
    """Whether an expression is a set: one that is written so, or of these names."""
    if isinstance(node, (ast.Set, ast.SetComp)) or _called(node) in ("set", "frozenset"):
        return True
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in named


def _keeps_order_of_set(node: ast.AST, named: set[str]) -> bool:
    if isinstance(node, (ast.comprehension, ast.For)):
        return _is_set(node.iter, named)
    given: list[Any] = node.args if isinstance(node, ast.Call) else []
    return _called(node) in KEEP_ORDER and any(_is_set(a, named) for a in given)


def _order_is_lost(source: Source, node: ast.AST) -> bool:
    """Whether the result goes into `sorted(...)` or the like, or into a set, at once."""
    outer = source.parents.get(node)
    while isinstance(outer, (ast.expr, ast.comprehension)):
        if _called(outer) in ORDERLESS or isinstance(outer, ast.SetComp):
            return True
        outer = source.parents.get(outer)
    return False
