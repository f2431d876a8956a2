"""How many rounds a loop over a `range`, or over a list, has, by the values that its variables have
in a frame."""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FrameType
from typing import Any

from ...events import Statement
from ..recording.frames import variables
from .ast_cache import called_name

_HEAD = re.compile(r"for [^:]+? in (.+):")
_SIZED = (list, tuple, dict, OrderedDict, set, str)
"""Types of which the length can be asked without running code of the user's; not of what derives
from them."""


def rounds(heads: Iterable[Statement], frame: FrameType) -> dict[int, int]:
    """The rounds of the loops among the statements around a line, by the line of their head, where
    they can be told without running code of the user's: from names, attributes of plain objects,
    and numbers."""
    found = {}
    for head in heads:
        over = _parsed(head.text) if head.kind == "for" else None
        count = _length(over, frame) if over is not None else None
        if count is not None:
            found[head.line] = count
    return found


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr | None:
    """What a loop runs over; None where its head cannot be parsed."""
    found = _HEAD.fullmatch(text)
    try:
        return ast.parse(found[1], mode="eval").body if found else None
    except (SyntaxError, ValueError, RecursionError):
        return None


def _length(over: ast.expr, frame: FrameType) -> int | None:
    """How many items an expression yields: a `range`, a list, a tensor or its parts, or what runs
    over these once (`enumerate`, `zip`)."""
    if isinstance(over, ast.ListComp | ast.GeneratorExp) and len(over.generators) == 1:
        only = over.generators[0]
        return None if only.ifs else _length(only.iter, frame)
    if not isinstance(over, ast.Call):
        value = _looked_up(over, frame)
        return len(value) if type(value) in _SIZED else _rows(over, frame)
    name, args = called_name(over), over.args
    if isinstance(over.func, ast.Attribute):
        if name in _VIEWS and not args:
            return _length(over.func.value, frame)
        return _parts(over.func, over, frame) if name in _PARTS else _rows(over, frame)
    if name in _OVER_ONE and args:
        return _length(args[0], frame)
    if over.keywords or not args:
        return None
    if name == "zip":
        lengths = [_length(a, frame) for a in args]
        return None if None in lengths else min(lengths)  # type: ignore[type-var]
    given = [_value(argument, frame) for argument in args] if name == "range" else []
    if not 0 < len(given) <= 3 or None in given or 0 in given[2:]:
        return None
    return len(range(*given))  # type: ignore[arg-type]


_OVER_ONE = ("enumerate", "reversed", "sorted", "list", "tuple", "tqdm")
"""Functions that yield one item for each of their first argument."""
_VIEWS = ("items", "keys", "values", "tolist")
_PARTS = ("split", "chunk")
"""Methods of tensors that yield parts of it."""


def _parts(func: ast.Attribute, call: ast.Call, frame: FrameType) -> int | None:
    """How many parts `x.split(size)` or `x.chunk(number)` has, along the first dimension."""
    rows = _rows(func.value, frame)
    number = _value(call.args[0], frame) if len(call.args) == 1 and not call.keywords else None
    if not rows or number is None or number <= 0:
        return None
    size = number if func.attr == "split" else -(-rows // number)
    return -(-rows // size)


def _rows(node: ast.expr, frame: FrameType) -> int | None:
    """The first dimension of a tensor: of a variable, or `torch.randperm(n)`."""
    if isinstance(node, ast.Call):
        counts = called_name(node) in ("randperm", "arange") and len(node.args) == 1
        return _value(node.args[0], frame) if counts else None
    value, torch = _looked_up(node, frame), sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or not value.dim():
        return None
    return int(value.shape[0])


def _value(node: ast.expr, frame: FrameType) -> int | None:
    if isinstance(node, ast.Call):
        counted = called_name(node) == "len" and len(node.args) == 1
        return _length(node.args[0], frame) if counted else None
    found = _looked_up(node, frame)
    return found if type(found) is int else None


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _looked_up(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        known = variables(frame)
        return known[node.id] if node.id in known else frame.f_globals.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _looked_up(node.value, frame)
        try:
            return object.__getattribute__(owner, "__dict__").get(node.attr)
        except AttributeError:
            return None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value(node.left, frame), _value(node.right, frame)
        if left is None or right is None:
            return None
        if right == 0 and isinstance(node.op, ast.FloorDiv):
            return None
        return _ARITHMETIC[type(node.op)](left, right)
    return None
