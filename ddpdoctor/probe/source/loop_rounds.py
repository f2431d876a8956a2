"""How many rounds a loop over a `range` has, by the values that its variables have in a frame."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from types import FrameType
from typing import Any

from ...events import Statement
from ..recording.frames import variables

_RANGE = re.compile(r"for [^:]+? in (range\(.*\)):")


def rounds(heads: Iterable[Statement], frame: FrameType) -> dict[int, int]:
    """The rounds of the loops among the statements around a line, by the line of their head, where
    they can be told without running code of the user's: from names, attributes of plain objects,
    and numbers."""
    found = {}
    for head in heads:
        call = _parsed(head.text) if head.kind == "for" else None
        given = [_value(argument, frame) for argument in call.args] if call else []
        if given and None not in given and 0 not in given[2:]:
            found[head.line] = len(range(*given))  # type: ignore[arg-type]
    return found


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.Call | None:
    """The call of `range` in the head of a loop; None where there is none that is plain."""
    found = _RANGE.fullmatch(text)
    try:
        node = ast.parse(found[1], mode="eval").body if found else None
    except (SyntaxError, ValueError, RecursionError):
        return None
    plain = isinstance(node, ast.Call) and 0 < len(node.args) <= 3 and not node.keywords
    return node if plain else None  # type: ignore[return-value]


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
