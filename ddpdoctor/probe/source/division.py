"""Whether a line of the user's code divides or multiplies by the world size, as written: a 2 at run
time may be the world size or something else; and which sums of a loop are divided by the length of
something."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from types import CodeType
from typing import NamedTuple

from .ast_cache import Source, called_name, covers_line, last_name, own_nodes, parts_of, source_of

_SIZE = re.compile(r"world|gpus?$|procs?$|processes|ranks$|replicas|n_?devices|dp_size")
_OTHER = re.compile(r"accum|micro|steps|local")


class _Names(NamedTuple):
    """What the names in a file stand for.

    Attributes:
        sizes: names that are assigned the world size.
        values: the value of each name that is assigned in one place only.
    """

    sizes: frozenset[str]
    values: dict[str, ast.expr]

    def meaning(self, node: ast.expr) -> ast.expr:
        """The value of a name that is assigned once; any other node itself."""
        names = _names(node)
        return self.values.get(names.pop(), node) if names else node


def _names_in(source: Source) -> _Names:
    statements = [node for node in source.nodes if isinstance(node, ast.Assign)]
    assigned = [
        pair for s in statements for target in s.targets for pair in _pairs(target, s.value)
    ]
    assigned += [pair for node in source.nodes for pair in _entries(node)]
    sizes: set[str] = set()
    for _ in range(2):  # twice, for `n = dist.get_world_size(); m = n` in any order
        sizes |= {name for name, value in assigned if _is_size(value, sizes)}
    return _Names(frozenset(sizes - {""}), _assigned_once(source, statements))


def _assigned_once(source: Source, statements: list[ast.Assign]) -> dict[str, ast.expr]:
    """The values of names that are assigned in one place only and are no parameters."""
    found = source.assignments
    places = found.names + found.attributes + found.arguments
    single = (s for s in statements if len(s.targets) == 1)
    values = {name: s.value for s in single for name in _names(s.targets[0])}
    return {name: value for name, value in values.items() if places[name] == 1}


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """The names that are assigned to with what each is given: two in `a, b = c, d`, and `a[0]` in
    `a = [c]`."""
    values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    if isinstance(target, ast.Tuple):
        return [(_name(t), v) for t, v in zip(target.elts, values, strict=False)]
    return [(_name(target), value), *((f"{_name(target)}[{n}]", v) for n, v in enumerate(values))]


def _entries(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """The keys of a dictionary, as they are looked up, with what is under them."""
    if isinstance(node, ast.Dict):
        return [(_looked_up(k), v) for k, v in zip(node.keys, node.values, strict=True) if k]
    if isinstance(node, ast.Call) and called_name(node) in ("dict", "update"):
        return [(f"['{k.arg}']", k.value) for k in node.keywords if k.arg]
    return []


def _names(target: ast.expr) -> set[str]:
    return {last_name(target)} - {""}


def _name(node: ast.expr) -> str:
    """What an expression goes by: the last part of a dotted name, `c` in `a.b.c`; what is looked
    up, `['c']` in `a["c"]` and `a.get("c")`, with the name it is looked up in for a number; empty
    for any other expression."""
    if isinstance(node, ast.Subscript):
        key = _looked_up(node.slice)
        return key if "'" in key else key and last_name(node.value) + key
    if isinstance(node, ast.Call) and node.args and called_name(node) in ("get", "getenv"):
        return _looked_up(node.args[0])
    return last_name(node)


def _looked_up(key: ast.expr) -> str:
    return f"[{key.value!r}]" if isinstance(key, ast.Constant) else ""


def _is_size(node: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression is the world size, by its name or by what the name was assigned."""
    if name := _name(node):
        word = name.strip("[']").lower()
        return (name in names or bool(_SIZE.search(word))) and not _OTHER.search(word)
    if isinstance(node, ast.Call):
        called = called_name(node)
        if called in ("int", "float", "max", "tensor"):
            return any(_is_size(a, names) for a in node.args)
        return bool(_SIZE.search(called.lower()))
    return False


def divided_by_world_size(file: str, line: int, *, product: bool = False) -> str:
    """The world size as written, if the statement on a line divides by it; else empty.

    Args:
        product: the divisor is the world size times something else.
    """
    source = source_of(file)
    if source is None:
        return ""
    names = source.once(_names_in)
    for node in source.around(line):
        for divisor in _divisors(node, names):
            for factor in _factors(names.meaning(divisor)) if product else [divisor]:
                if _is_size(factor, names.sizes):
                    return ast.unparse(factor)[:80]
    return ""


def multiplied_by_world_size(file: str, line: int) -> str:
    """The world size as written, if the statement on a line multiplies by it; else empty."""
    source = source_of(file)
    if source is None:
        return ""
    names = source.once(_names_in)
    factors = (f for node in source.around(line) for f in _multipliers(node))
    return next((ast.unparse(f)[:80] for f in factors if _is_size(f, names.sizes)), "")


def loss_divided(code: CodeType, line: int) -> tuple[int, str]:
    """Where a function divides by the world size the tensor that a line calls `backward` on: the
    line and the divisor as written; (-1, "") if it does not."""
    source = source_of(code.co_filename)
    if source is None:
        return -1, ""
    names = source.once(_names_in)
    plain = [n for n in parts_of(code) if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    plain = [s for s in plain if s.lineno <= line]
    here = [s for s in plain if line <= (s.end_lineno or s.lineno)]
    here = [s for s in here if any(getattr(n, "attr", "") == "backward" for n in ast.walk(s))]
    roots = {n.id for s in here for n in ast.walk(s) if isinstance(n, ast.Name)}
    for statement in [*here, *plain]:
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        assigned = {n for t in targets if isinstance(t, ast.expr) for n in _names(t)}
        if statement not in here and not assigned & roots:
            continue
        for divisor in (d for node in ast.walk(statement) for d in _divisors(node, names)):
            if _is_size(divisor, names.sizes):
                return statement.lineno, ast.unparse(divisor)[:80]
    return -1, ""


def _factors(node: ast.expr) -> list[ast.expr]:
    """The factors of a product; empty for any other expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [f for side in (node.left, node.right) for f in _factors(side) or [side]]
    return []


def _multipliers(node: ast.AST) -> list[ast.expr]:
    """What a node multiplies."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return [node.value]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("mul", "mul_", "multiply"):
        return list(node.args)
    return []


def _divisors(node: ast.AST, names: _Names) -> list[ast.expr]:
    """What a node divides by; for `x * name`, also the divisor in `name = 1 / n`. Not what a value
    is divided by of which no gradient comes back."""
    if isinstance(node, ast.BinOp) and _is_detached(node.left):
        return []
    if isinstance(node, ast.BinOp):
        operation, operands = node.op, [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        operation, operands = node.op, [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("div", "div_", "true_divide"):
            return [] if _is_detached(node.func.value) else list(node.args)
        if node.func.attr in ("mul", "mul_"):
            return [d for a in node.args for d in _divisors(names.meaning(a), names)]
        return []
    else:
        return []
    if isinstance(operation, ast.Div):
        return operands[-1:]
    if isinstance(operation, ast.Mult):
        quotients = [names.meaning(o) for o in operands if _names(o)]
        return [d for q in quotients for d in _quotient(q)]
    return []


def _is_detached(node: ast.expr) -> bool:
    """Whether an expression is, or is computed from, `x.detach()`, `x.item()` or the like alone."""
    if isinstance(node, ast.BinOp):
        return _is_detached(node.left) and not isinstance(node.op, (ast.Add, ast.Sub))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _DETACHES or _is_detached(node.func.value)
    return isinstance(node, ast.Attribute) and node.attr == "data"


_DETACHES = ("detach", "item", "tolist", "numpy")


def _quotient(node: ast.expr) -> list[ast.expr]:
    """The divisor of a quotient; empty for any other expression."""
    return [node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else []


REDUCES = re.compile(r"reduce|gather|synchroni[sz]e|sync_|mean_over|across", re.IGNORECASE)
"""Part of the names of functions that sum over ranks."""


class TotalDivision(NamedTuple):
    """A sum that is divided after the loop.

    Attributes:
        total: as written; `of`: what `len` is called with, to be resolved.
    """

    line: int
    total: str
    of: ast.expr


def totals_divided(code: CodeType, line: int) -> tuple[TotalDivision, ...]:
    """The sums that the loop at this line of a function adds up and that the function divides by a
    `len(...)`, if no function that may reduce them is given them."""
    source = source_of(code.co_filename)
    function = source.function(code) if source is not None else None
    return () if function is None else _totals_divided(function, line)


def _totals_divided(function: ast.AST, line: int) -> tuple[TotalDivision, ...]:
    nodes = own_nodes(function)
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
    found = [
        d for n in nodes if (d := _division_of_total(n, added, lengths)) and d.line > loop.lineno
    ]
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


def _division_of_total(
    node: ast.AST, added: set[str], lengths: dict[str, ast.expr]
) -> TotalDivision | None:
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
    return TotalDivision(node.lineno, mine[0], of)
