"""Branches of the user's that cannot run, as far as their conditions can be told without running
them: of names that a file gives a value once, and of options of the command line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from types import CodeType
from typing import Any

from .ast_cache import Given, source_of
from .source_text import parts_of

PLAIN = (str, int, float)

Lookup = Callable[[str], Any]


def never_runs(code: CodeType, line: int, lookup: Lookup) -> bool:
    """Whether a line of a function stands in the arm of an `if` that is not taken."""
    source = source_of(code.co_filename)
    if source is None:
        return False
    for choice in parts_of(code):
        if isinstance(choice, ast.If) and choice.lineno <= line <= (choice.end_lineno or 0):
            body = line <= (choice.body[-1].end_lineno or 0)
            if _truth(choice.test, source.given, lookup) is (not body):
                return True
    return False


def _truth(test: ast.expr, given: Given, lookup: Lookup) -> bool | None:
    """Of a condition; None where it cannot be told."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, given, lookup)
        return None if inner is None else not inner
    try:
        if not isinstance(test, ast.Compare):
            return bool(_value(test, given, lookup))
        left, right = (_value(e, given, lookup) for e in (test.left, test.comparators[0]))
    except LookupError:
        return None
    if len(test.ops) > 1:
        return None
    if isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return bool(left == right) is isinstance(test.ops[0], ast.Eq)
    if isinstance(test.ops[0], (ast.In, ast.NotIn)) and isinstance(right, tuple):
        return (left in right) is isinstance(test.ops[0], ast.In)
    return None


def _value(node: ast.expr, given: Given, lookup: Lookup) -> Any:
    """What an expression has been since the program began.

    Raises:
        LookupError: it may have been something else.
    """
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return tuple(_value(e, given, lookup) for e in node.elts)
    found: Any = None
    if isinstance(node, ast.Constant):
        found = node.value
    elif isinstance(node, ast.Name) and _given_once(node.id, given):
        found = lookup(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        options = lookup(node.value.id)
        if type(options) is argparse.Namespace and not given.attributes[node.attr]:
            found = vars(options).get(node.attr)
    if type(found) not in (*PLAIN, bool):
        raise LookupError(ast.dump(node))
    return found


def _given_once(name: str, given: Given) -> bool:
    """Whether a file names something once and for all: outside of functions and loops."""
    elsewhere = given.arguments[name] or name in given.declared
    return not elsewhere and given.names[name] == 1 and name in given.lasting
