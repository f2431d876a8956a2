"""Which values does a function compare, and which of them decide whether a line runs?"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType

from .ast_cache import Source, covers_line, last_name, own_nodes, source_of

COMPARED_AT_MOST = 8
"""Values of one function: more are compared in code that works on data."""

_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def compared(code: CodeType) -> tuple[ast.expr, ...]:
    """The variables and attributes that a function compares by `<` and the like, each once."""
    source = source_of(code.co_filename)
    function = source.function(code) if source is not None else None
    if source is None or function is None:
        return ()
    return source.once(_compared, function)


def deciding(code: CodeType, line: int) -> tuple[ast.expr, ...]:
    """The values of a function that an `if` around a line compares with the best one so far:
    `value` in `if value > best: best = value`. Other comparisons are with a limit, as of time."""
    source = source_of(code.co_filename)
    function = source.function(code) if source is not None else None
    if function is None:
        return ()
    found: dict[str, ast.expr] = {}
    nodes = list(own_nodes(function))
    sets = [n for n in nodes if isinstance(n, ast.Assign)]
    for choice in nodes:
        if not isinstance(choice, ast.If) or not any(covers_line(s, line) for s in choice.body):
            continue
        asked = [*ast.walk(choice.test)]
        names = {n.id for n in asked if isinstance(n, ast.Name)}
        for node in sets:  # `improved = value > best`, then `if improved:`
            if names & {*map(ast.unparse, node.targets)}:
                asked += ast.walk(node.value)
        for sides in _compares(asked):
            for value, best in itertools.permutations(sides, 2):
                if any(_keeps(node, ast.unparse(value), ast.unparse(best)) for node in sets):
                    found[ast.unparse(value)] = value
    return tuple(found.values())


def _compared(source: Source, function: ast.AST) -> tuple[ast.expr, ...]:
    found = {ast.unparse(value): value for value in _operands(own_nodes(function))}
    return tuple(found.values())[:COMPARED_AT_MOST]


def _operands(nodes: Iterable[ast.AST]) -> list[ast.expr]:
    return [side for sides in _compares(nodes) for side in sides]


def _compares(nodes: Iterable[ast.AST]) -> Iterator[list[ast.expr]]:
    """Of each comparison among some nodes, the operands that are variables, attributes or items."""
    for node in nodes:
        if isinstance(node, ast.Compare) and all(isinstance(o, _ORDERS) for o in node.ops):
            sides = map(_bare, (node.left, *node.comparators))
            yield [side for side in sides if isinstance(side, _VALUES)]


def _keeps(node: ast.Assign, value: str, best: str) -> bool:
    """Whether a statement is `best = value` or `best = max(best, value)`."""
    if best not in map(ast.unparse, node.targets):
        return False
    given = _bare(node.value)
    if isinstance(given, ast.Call) and last_name(given.func) in ("max", "min"):
        return any(ast.unparse(_bare(a)) == value for a in given.args)
    return ast.unparse(given) == value


_VALUES = (ast.Name, ast.Attribute, ast.Subscript)


def _bare(node: ast.expr) -> ast.expr:
    """`x` for `float(x)`, `x.item()`, `-x` and `(x := y)`."""
    if isinstance(node, ast.UnaryOp):
        return _bare(node.operand)
    if isinstance(node, ast.NamedExpr):
        return node.target
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item":
            return _bare(node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1:
            return _bare(node.args[0])
    return node
