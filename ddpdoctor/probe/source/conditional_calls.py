"""The conditions within an expression under which the calls on a line are made, as in
`f() if x else y` or `x and f()`."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator

_MAY_CHOOSE = re.compile(r"\b(?:if|and|or)\b")
_OPEN = ("(", "[", "{", ",", "\\", "=")
_LINES_LIMIT = 12
"""Longer statements are not searched: each line more is one more attempt to parse."""
_ASKS = re.compile(r"is_\w+$|(?:get_)?(?:(?:local|global|group|node)_)?rank$")
"""Names of functions that ask for the rank: calls of them are no collectives."""
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)


def conditions(lines: list[str], line: int) -> tuple[str, ...]:
    """The conditions under which all calls on a line are made, innermost first, each as `if x`.
    Empty if a call is made unconditionally, or in both cases."""
    if not _MAY_CHOOSE.search(lines[line - 1]) and line not in _continued(lines, line):
        return ()
    first = _first(lines, line)
    statement = _statement(lines, first, line)
    if statement is None:
        return ()
    node, text = statement
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and not _is_plain(n)]
    return tuple(reversed([*_around(node, calls, text)])) if calls else ()


def _continued(lines: list[str], line: int) -> range:
    """The lines up to this one of a statement that spans several lines; empty if it has one."""
    first = _first(lines, line)
    code = lines[line - 1].strip()
    after = lines[line].strip() if line < len(lines) else ""
    more = first < line or code.endswith(_OPEN) or after.startswith(("if ", "and ", "or "))
    return range(first, line + 1) if more else range(0)


def _first(lines: list[str], line: int) -> int:
    """The line on which a statement begins, guessed by brackets and commas at the ends of lines."""
    first = line
    while 1 < first > line - _LINES_LIMIT:
        before = lines[first - 2].strip()
        here = lines[first - 1].strip()
        if not before.endswith(_OPEN) and not here.startswith(("if ", "and ", "or ", "else ")):
            break
        if not before.endswith(_OPEN) and here.startswith("if ") and here.endswith(":"):
            break
        first -= 1
    return first


# Parsed by itself rather than with `ast_cache`: this runs for every call site, and most files need
# not be parsed at all.
def _statement(lines: list[str], first: int, line: int) -> tuple[ast.stmt, str] | None:
    for last in range(line, min(len(lines), first + _LINES_LIMIT) + 1):
        text = textwrap.dedent("".join(lines[first - 1 : last]))
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError):
            continue
        simple = len(body) == 1 and isinstance(body[0], _SIMPLE)
        return (body[0], text) if simple else None
    return None


def _is_plain(call: ast.Call) -> bool:
    """Whether a call is no communication: of a built-in function, or of one that asks for the
    rank."""
    name = call.func
    if isinstance(name, ast.Name):
        return name.id in vars(builtins) or _ASKS.match(name.id) is not None
    return isinstance(name, ast.Attribute) and _ASKS.match(name.attr) is not None


def _around(node: ast.stmt, calls: list[ast.Call], text: str) -> Iterator[str]:
    """The conditions around all of some calls, outermost first."""
    for choice in ast.walk(node):
        if isinstance(choice, ast.IfExp):
            if _are_in(choice.body, calls):
                yield f"if {_written(choice.test, text)}"
            elif _are_in(choice.orelse, calls):
                yield f"if {_negated(choice.test, text)}"
        elif isinstance(choice, ast.BoolOp) and _are_in(choice.values[-1], calls):
            before = choice.values[:-1]
            if isinstance(choice.op, ast.And):
                yield f"if {' and '.join(_written(value, text) for value in before)}"
            elif len(before) == 1:
                yield f"if {_negated(before[0], text)}"


def _are_in(node: ast.expr, calls: list[ast.Call]) -> bool:
    within = {*ast.walk(node)}
    return all(call in within for call in calls)


def _negated(test: ast.expr, text: str) -> str:
    written = _written(test, text)
    loose = isinstance(test, (ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda, ast.NamedExpr))
    return f"not ({written})" if loose else f"not {written}"


def _written(test: ast.expr, text: str) -> str:
    return " ".join((ast.get_source_segment(text, test) or ast.unparse(test)).split())
