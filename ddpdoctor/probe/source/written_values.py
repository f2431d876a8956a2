"""Does what a line writes to a file come from a loop?"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .ast_cache import called_name, given, own_nodes
from .dependence import Expression, Line, Loop, Search, Stack, may_exchange, spans

_ASSIGNED = (ast.Assign, ast.AnnAssign)


def written_result(running: list[Line], evaluating: list[Line]) -> str | None:
    """The variable of a loop that gives a value which is written to a file, where the innermost
    line of a stack opens that file; None where no loop does, or not this process alone.

    Args:
        running: the stack; evaluating: the one in which the loop began.
    """
    began = Stack(evaluating)
    loop = Loop(began)
    if loop.node is None:
        return None
    stack = Stack(running)
    for depth, (_, line) in enumerate(running):
        function = stack.functions[depth]
        for value in _written(function, line) if function is not None else ():
            search = Search(began, loop)
            if search.reach(Expression(stack, depth, value), value) is not None:
                way = search.ways[-1]
                variable = way.name or (way.before.name if way.before is not None else None)
                return None if may_exchange(search) else ast.unparse(variable or value)
    return None


def _written(function: ast.AST, line: int) -> Iterator[ast.expr]:
    """What a function hands over to the file that a line opens, or to what that line calls."""
    nodes = [*own_nodes(function)]
    for node in nodes:
        if isinstance(node, (ast.With, ast.AsyncWith)):
            opening = [i for i in node.items if spans(i.context_expr, line)]
            for item in opening:
                if item.optional_vars is not None:
                    inside = [n for statement in node.body for n in ast.walk(statement)]
                    yield from _handed_over(inside, _name(item.optional_vars))
            if opening:
                return
        elif isinstance(node, _ASSIGNED) and node.value is not None and spans(node.value, line):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield from _handed_over(nodes, _name(target))
    for node in nodes:
        if isinstance(node, ast.Call) and spans(node, line) and called_name(node) != "open":
            if isinstance(node.func, ast.Attribute):
                yield node.func.value
            yield from given(node)


def _handed_over(nodes: list[ast.AST], file: str) -> Iterator[ast.expr]:
    """The arguments of the calls that are given a file, or are methods of it, or of what is made
    from it (`csv.writer(file)`)."""
    files = {file}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made_from = {_name(value) for value in given(node.value)}
            if made_from & files:
                files.add(_name(node.targets[0]))
    files.discard("")
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        values = given(node)
        if owner in files or any(_name(value) in files for value in values):
            yield from (value for value in values if _name(value) not in files)


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
