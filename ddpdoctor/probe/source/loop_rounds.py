"""How many rounds a loop over a `range`, or over a list, has, by the values that its variables have
in a frame."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from types import FrameType
from typing import Any

from ...events import Statement
from ..recording.frames import variables

_HEAD = re.compile(r"for [^:]+? in (.+):")
_SIZED = (list, tuple, dict, set, str)
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
    """How many items an expression yields: a `range`, a list, or `enumerate` of these."""
    if not isinstance(over, ast.Call):
        value = _looked_up(over, frame)
        return len(value) if type(value) in _SIZED else None
    name = over.func.id if isinstance(over.func, ast.Name) else ""
    if over.keywords or not over.args:
        return None
    if name == "enumerate":
        return _length(over.args[0], frame)
    given = [_value(argument, frame) for argument in over.args] if name == "range" else []
    if not 0 < len(given) <= 3 or None in given or 0 in given[2:]:
        return None
    return len(range(*given))  # type: ignore[arg-type]


def _value(node: ast.expr, frame: FrameType) -> int | None:
    found = _looked_up(node, frame)
    return found if type(found) is int else None


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
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left, right = _value(node.left, frame), _value(node.right, frame)
        if left is None or right is None:
            return None
        return left + right if isinstance(node.op, ast.Add) else left - right
    return None
