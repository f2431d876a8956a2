"""Which statements of the user's source change tensors in place. Read only after digests have shown
that tensors changed between two moments."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

from .ast_cache import Source, called_name, function_of, parts_of, source_of, without_gradients

Place = tuple[CodeType, int]

_NAMES = ("reset_parameters", "apply")
_CALL = re.compile(r"\(|load|data|batch")
_PARAMETERS = re.compile(r"param|module|children|layer|weight|model|net", re.IGNORECASE)
_DEEP = 3
"""How many calls of functions of the same file are followed: a helper of a helper of a helper."""


def inplace_statements(begin: list[Place], end: list[Place]) -> list[Place]:
    """The statements that write to tensors between two moments.

    Args:
        begin, end: the lines that were executing at each moment, outermost function first.

    Returns:
        The statements of one block; empty if there are some in several blocks, since it is not
        known which of these ran.
    """
    found: list[Place] = []
    places = 0
    for code, first, last in _windows(begin, end):
        function = function_of(code)
        source = source_of(code.co_filename)
        if function is None or source is None:
            return []
        within = Within(function, source)
        for block in _blocks(function):
            lines = [
                statement.lineno
                for statement, quiet in block
                if first < statement.lineno < last and _edits(statement, quiet, within, _DEEP)
            ]
            places += bool(lines)
            found += [(code, line) for line in lines]
    return found if places == 1 else []


def _windows(begin: list[Place], end: list[Place]) -> Iterator[tuple[CodeType, int, int]]:
    """The lines of each function that may have run: the rest of those that were running at the
    begin, the first lines of those that run at the end."""
    common = 0
    while common < min(len(begin), len(end)) and begin[common] == end[common]:
        common += 1
    if common and common == len(begin) == len(end):
        common -= 1  # the same line again: a round of a loop
    here, there = begin[common:], end[common:]
    if here and there and here[0][0] is there[0][0]:
        code, first, last = here[0][0], here[0][1], there[0][1]
        if first < last:
            yield code, first, last
        elif (loop := _loop_around(code, first, last)) is not None:
            yield code, first, (loop.end_lineno or first) + 1
            yield code, loop.lineno, last
        here, there = here[1:], there[1:]
    for code, line in here:
        yield code, line, sys.maxsize
    for code, line in there:
        yield code, code.co_firstlineno, line


def _loop_around(code: CodeType, *lines: int) -> ast.For | ast.While | None:
    """The innermost loop of a function with these lines in its body."""
    loops = [n for n in parts_of(code) if isinstance(n, (ast.For, ast.While))]
    around = [n for n in loops if all(n.lineno < line <= (n.end_lineno or 0) for line in lines)]
    return max(around, key=lambda n: n.lineno, default=None)


class Within(NamedTuple):
    """A function (or a whole file), and the file that it is in."""

    function: ast.AST
    source: Source


Block = list[tuple[ast.stmt, bool]]


def _blocks(node: ast.AST, quiet: bool = False) -> list[Block]:
    """The simple statements of a function, block by block, each with whether it is under
    `no_grad`."""
    found: list[Block] = []
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block: Block = []
        inner = quiet or without_gradients(node)
        for child in getattr(node, name, ()) or ():
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if hasattr(child, "body") or hasattr(child, "cases"):
                found += _blocks(child, inner)
            elif isinstance(child, ast.stmt):
                block.append((child, inner))
        if block:
            found.append(block)
    return found


# Under `no_grad`, `p[0] = 1` and `p += 1` are taken for writes to a parameter. Elsewhere autograd
# refuses these on a leaf that requires a gradient, so they write to something else.
def _edits(statement: ast.stmt, quiet: bool, within: Within, deep: int) -> bool:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    for target in targets:
        owner = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(owner, ast.Attribute) and owner.attr == "data":
            return True
        if quiet and (isinstance(statement, ast.AugAssign) or isinstance(target, ast.Subscript)):
            return True
    calls = (n for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(_changes(call, within, deep) for call in calls)


def _changes(call: ast.Call, within: Within, deep: int) -> bool:
    name = called_name(call)
    in_place = name.endswith("_") and not name.endswith("__") and "grad" not in name
    if name in _NAMES:
        return True
    if in_place:
        owner = getattr(call.func, "value", None)
        return not (isinstance(owner, ast.Name) and owner.id in _results(within))
    return deep > 0 and any(
        _edits(statement, quiet, Within(node, within.source), deep - 1)
        for node in within.source.defined.get(name, ())
        for block in _blocks(node)
        for statement, quiet in block
    )


def _results(within: Within) -> set[str]:
    """Names assigned from calls or loaders whose text does not speak of parameters: mostly batches,
    which may be changed in place."""
    found: set[str] = set()
    for node in within.source.parts(within.function):
        if isinstance(node, ast.Assign):
            made, targets = node.value, node.targets
        elif isinstance(node, (ast.For, ast.comprehension)):
            made, targets = node.iter, [node.target]
        else:
            continue
        if _CALL.search(text := ast.unparse(made)) and not _PARAMETERS.search(text):
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found
