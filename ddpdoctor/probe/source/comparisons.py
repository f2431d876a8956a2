"""Which values does a function compare?"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType

from .ast_cache import Source, called_name, own_nodes, source_of

COMPARED_AT_MOST = 8
"""Values of one function: more are compared in code that works on data."""

CHOOSE = ("min", "max")
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def compared(code: CodeType) -> tuple[ast.expr, ...]:
    """The variables and attributes that a function compares by `<` and the like, each once."""
    source = source_of(code.co_filename)
    function = source.function(code) if source is not None else None
    if source is None or function is None:
        return ()
    return source.once(_compared, function)


def _compared(source: Source, function: ast.AST) -> tuple[ast.expr, ...]:
    sides = map(bare, (s for sides in ordered(own_nodes(function)) for s in sides))
    found = {ast.unparse(side): side for side in sides if isinstance(side, _VALUES)}
    return tuple(found.values())[:COMPARED_AT_MOST]


def ordered(nodes: Iterable[ast.AST]) -> Iterator[list[ast.expr]]:
    """The operands of each comparison among some nodes that is by order, or with a minimum or
    maximum (`loss == min(losses)`)."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(s, ast.Call) and called_name(s) in CHOOSE for s in sides) or all(
                isinstance(o, _ORDERS) for o in node.ops
            ):
                yield sides


_VALUES = (ast.Name, ast.Attribute, ast.Subscript)


def bare(node: ast.expr) -> ast.expr:
    """`x` for `float(x)`, `x.item()`, `-x` and `(x := y)`."""
    if isinstance(node, ast.UnaryOp):
        return bare(node.operand)
    if isinstance(node, ast.NamedExpr):
        return node.target
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item":
            return bare(node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1:
            return bare(node.args[0])
    return node
