"""Statements whose condition asks for the rank."""

from __future__ import annotations

import ast
import contextlib
import re

from ...events import Statement

ON_RANK = re.compile(
    r"\brank|_rank\b|\br\s*(?:==|!=|%|in\b)|(?:\b|_)RANK|\bis_main|\bmain_process|\bis_master"
    r"|\bmaster(?:_process)?\b|\bis_chief|\bis_leader|rank_zero|rank0|global_zero|process_index|\bis_first"
    r"|\bprimary\b",
)
_STRING = re.compile(r"""(?P<key>[\w\])]\[|get\(|getenv\()?(?P<quote>["']).*?(?P=quote)""")


OF_ANY_RANK = re.compile(r"[\w.]*rank\s*(?:(?:[!=]=|>)\s*-\s*1\b|>=\s*0\b|<\s*0\b)")
"""A condition on whether there are ranks at all, -1 being the rank of a run without any."""


def _asks(test: str) -> bool:
    return ON_RANK.search(OF_ANY_RANK.sub("", unquoted(test))) is not None


def on_rank(inside: tuple[Statement, ...]) -> list[Statement]:
    """The statements whose condition asks for the rank, so that only some ranks enter them."""
    return [e for e in inside if _asks(e.test)]


def unquoted(text: str) -> str:
    """A statement without strings that are no keys: `mode == "rank0"` does not ask for the rank."""
    return _STRING.sub(lambda found: found[0] if found["key"] else "", text)


def part_on_rank(head: Statement) -> tuple[str, str] | None:
    """The part of a condition that asks for the rank, and the rest; None where that is not clear.

    Examples: `if step % n == 0 and rank == 0:`, and `if step % n or rank:` before the call.
    """
    test: ast.expr | None = None
    with contextlib.suppress(SyntaxError, ValueError):
        test = ast.parse(head.test, mode="eval").body
    past = head.kind == "past"
    if head.kind not in ("if", "past") or not isinstance(test, ast.BoolOp):
        return None
    if isinstance(test.op, ast.Or) is not past:
        return None
    parts = [_written(head.test, value) for value in test.values]
    ranked = [part for part in parts if _asks(part)]
    rest = [part for part in parts if part not in ranked]
    return (ranked[0], f" {'or' if past else 'and'} ".join(rest)) if len(ranked) == 1 else None


def is_plain(condition: str) -> bool:
    """Whether a condition can hold on every rank: it only computes with names and numbers.

    One that looks into an object may raise on ranks that do not have it (`writer.due`), and a test
    for None does not hold there (`writer is not None`).
    """
    try:
        tree = ast.parse(condition, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return not any(
        isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Is, ast.IsNot, ast.In))
        for node in ast.walk(tree)
    )


def _written(code: str, value: ast.expr) -> str:
    text = ast.get_source_segment(code, value) or ""
    loose = isinstance(value, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr))
    return f"({text})" if loose else text
