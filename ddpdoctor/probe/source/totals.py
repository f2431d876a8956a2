"""Which sums of a loop over a loader does a function divide by the length of something?"""

from __future__ import annotations

import ast
import re
from types import CodeType
from typing import NamedTuple

from .ast_cache import called_name, covers_line, own_nodes, source_of

REDUCES = re.compile(r"reduce|gather|synchroni[sz]e|sync_|mean_over|across", re.IGNORECASE)
"""Part of the names of functions that sum over ranks."""


class Division(NamedTuple):
    """A sum that is divided after the loop.

    Attributes:
        total: as written; `of`: what `len` is called with, to be resolved.
    """

    line: int
    total: str
    of: ast.expr


def divided(code: CodeType, line: int) -> tuple[Division, ...]:
    """The sums that the loop at this line of a function adds up and that the function divides by a
    `len(...)`, if no function that may reduce them is given them."""
    source = source_of(code.co_filename)
    function = source.function(code) if source is not None else None
    return () if function is None else _divided(function, line)


def _divided(function: ast.AST, line: int) -> tuple[Division, ...]:
    nodes = list(own_nodes(function))
    loops = [n for n in nodes if isinstance(n, ast.For) and covers_line(n.iter, line)]
    if not loops:
        return ()
    loop = loops[-1]
    added = {
        ast.unparse(n.target)
        for n in ast.walk(loop)
        if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)
    }
    lengths = {
        target.id: of
        for node in nodes
        if isinstance(node, ast.Assign) and (of := _length_of(node.value)) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = [d for n in nodes if (d := _division(n, added, lengths)) and d.line > loop.lineno]
    reduced = " ".join(
        ast.unparse(argument)
        for n in nodes
        if isinstance(n, ast.Call) and REDUCES.search(called_name(n))
        for argument in (*n.args, *(k.value for k in n.keywords))
    )
    words = set(re.findall(r"[\w.]+", reduced))
    return tuple(d for d in found if d.total not in words)


def _length_of(node: ast.AST) -> ast.expr | None:
    """What a call of `len` is given; None for anything else."""
    is_call = isinstance(node, ast.Call) and called_name(node) == "len" and len(node.args) == 1
    return node.args[0] if is_call else None  # type: ignore[attr-defined]


def _division(node: ast.AST, added: set[str], lengths: dict[str, ast.expr]) -> Division | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        total, divisor = node.left, node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        total, divisor = node.target, node.value
    else:
        return None
    parts = {ast.unparse(n) for n in ast.walk(total) if isinstance(n, (ast.Name, ast.Attribute))}
    of = _length_of(divisor)
    if of is None and isinstance(divisor, ast.Name):
        of = lengths.get(divisor.id)
    if of is None or not (mine := sorted(parts & added)):
        return None
    return Division(node.lineno, mine[0], of)
