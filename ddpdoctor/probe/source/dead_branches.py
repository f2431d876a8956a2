"""Which branches of the user's code never run: those whose conditions depend only on constants,
names that the file assigns once, and options of `argparse`. Nothing is executed. And under which
condition does a file make a call?"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from types import CodeType
from typing import Any

from .ast_cache import Assignments, called_name, parts_of, source_of

PLAIN = (str, int, float)
"""Types whose comparison runs no code of the user's."""

Lookup = Callable[[str], Any]


def never_runs(code: CodeType, line: int, lookup: Lookup) -> bool:
    """Whether a line of a function is in the arm of an `if` that is never taken.

    Args:
        lookup: returns the value of a name, None if it has none.
    """
    source = source_of(code.co_filename)
    if source is None:
        return False
    for choice in parts_of(code):
        if isinstance(choice, ast.If) and choice.lineno <= line <= (choice.end_lineno or 0):
            body = line <= (choice.body[-1].end_lineno or 0)
            if _truth(choice.test, source.assignments, lookup) is (not body):
                return True
    return False


def _truth(test: ast.expr, assignments: Assignments, lookup: Lookup) -> bool | None:
    """Whether a condition holds; None if that is not known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, assignments, lookup)
        return None if inner is None else not inner
    try:
        if not isinstance(test, ast.Compare):
            return bool(_value(test, assignments, lookup))
        left, right = (_value(e, assignments, lookup) for e in (test.left, test.comparators[0]))
    except LookupError:
        return None
    if len(test.ops) > 1:
        return None
    if isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return bool(left == right) is isinstance(test.ops[0], ast.Eq)
    if isinstance(test.ops[0], (ast.In, ast.NotIn)) and isinstance(right, tuple):
        return (left in right) is isinstance(test.ops[0], ast.In)
    return None


def _value(node: ast.expr, assignments: Assignments, lookup: Lookup) -> Any:
    """The value that an expression has had since the program began.

    Raises:
        LookupError: it may have changed, or is not a plain value.
    """
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return tuple(_value(e, assignments, lookup) for e in node.elts)
    found: Any = None
    if isinstance(node, ast.Constant):
        found = node.value
    elif isinstance(node, ast.Name) and _assigned_once(node.id, assignments):
        found = lookup(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        options = lookup(node.value.id)
        if type(options) is argparse.Namespace and not assignments.attributes[node.attr]:
            found = vars(options).get(node.attr)
    if type(found) not in (*PLAIN, bool):
        raise LookupError(ast.dump(node))
    return found


def _assigned_once(name: str, assignments: Assignments) -> bool:
    """Whether a file assigns a name once only, at module level, outside of branches and loops."""
    elsewhere = assignments.arguments[name] or name in assignments.declared
    return not elsewhere and assignments.names[name] == 1 and name in assignments.lasting


def call_under_condition(file: str, name: str) -> tuple[int, str] | None:
    """The first call of a function in a file, with the innermost `if` around it as written; None
    where it makes none, or one without a condition."""
    source = source_of(file)
    if source is None:
        return None
    for call in source.nodes:
        if isinstance(call, ast.Call) and called_name(call) == name:
            around = [n for n in source.around(call.lineno) if isinstance(n, ast.If)]
            test = f"if {source.written(around[-1].test)}:" if around else ""
            if not test or "is_initialized" in test or "__name__" in test:
                return None
            body = call.lineno <= (around[-1].body[-1].end_lineno or 0)
            return call.lineno, test[:120] if body else f"else:  # {test[:110]}"
    return None
