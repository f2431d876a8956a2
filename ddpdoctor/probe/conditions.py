"""Branches of the user's that cannot run, as far as their conditions can be told without running
them: of names that a file gives a value once, and of options of the command line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from types import CodeType
from typing import Any

from .sources import function_of, tree_of

PLAIN = (str, int, float)

Lookup = Callable[[str], Any]


def never_runs(code: CodeType, line: int, lookup: Lookup) -> bool:
    """Whether a line of a function stands in the arm of an `if` that is not taken."""
    function, tree = function_of(code), tree_of(code.co_filename)
    if function is None or tree is None:
        return False
    for choice in ast.walk(function):
        if isinstance(choice, ast.If) and choice.lineno <= line <= (choice.end_lineno or 0):
            body = line <= (choice.body[-1].end_lineno or 0)
            if _truth(choice.test, tree, lookup) is (not body):
                return True
    return False


def _truth(test: ast.expr, tree: ast.Module, lookup: Lookup) -> bool | None:
    """Of a condition; None where it cannot be told."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, tree, lookup)
        return None if inner is None else not inner
    try:
        if not isinstance(test, ast.Compare):
            return bool(_value(test, tree, lookup))
        left, right = (_value(e, tree, lookup) for e in (test.left, test.comparators[0]))
    except LookupError:
        return None
    if len(test.ops) > 1:
        return None
    if isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return bool(left == right) is isinstance(test.ops[0], ast.Eq)
    if isinstance(test.ops[0], (ast.In, ast.NotIn)) and isinstance(right, tuple):
        return (left in right) is isinstance(test.ops[0], ast.In)
    return None


def _value(node: ast.expr, tree: ast.Module, lookup: Lookup) -> Any:
    """What an expression has been since the program began.

    Raises:
        LookupError: it may have been something else.
    """
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return tuple(_value(e, tree, lookup) for e in node.elts)
    found: Any = None
    if isinstance(node, ast.Constant):
        found = node.value
    elif isinstance(node, ast.Name) and _given_once(node.id, tree):
        found = lookup(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        options = lookup(node.value.id)
        if type(options) is argparse.Namespace and not _assigned(node.attr, tree):
            found = vars(options).get(node.attr)
    if type(found) not in (*PLAIN, bool):
        raise LookupError(ast.dump(node))
    return found


def _given_once(name: str, tree: ast.Module) -> bool:
    """Whether a file names something once and for all: outside of functions and loops."""
    lasting = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg == name:
            return False
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return False
        lasting += isinstance(node, ast.Name) and node.id == name and _stores(node)
    statements = (s for s in tree.body if isinstance(s, (ast.Assign, ast.AnnAssign)))
    given = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)]
    return lasting == 1 and any(n.id == name and _stores(n) for n in given)


def _assigned(attribute: str, tree: ast.Module) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == attribute and _stores(n) for n in ast.walk(tree)
    )


def _stores(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)
