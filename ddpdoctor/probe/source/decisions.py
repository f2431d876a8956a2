"""Which values does a function compare, and which of them, a result of an evaluation, decides
whether a line runs? And does a line write a result to a file?"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import NamedTuple

from .ast_cache import Function, Source, called_name, given, own_nodes, source_of
from .dependence import NO_RESULT, Expression, Line, Loop, Search, Stack, may_exchange, names, spans

COMPARED_AT_MOST = 8
"""Values of one function: more are compared in code that works on data."""

CHOOSE = ("min", "max")
_ASSIGNED = (ast.Assign, ast.AnnAssign)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Decision(NamedTuple):
    """A comparison that decides.

    Attributes:
        code: the function with it.
        value: the operand that comes from the evaluation; `line` is that of the comparison.
    """

    code: CodeType
    value: ast.expr
    line: int


def deciding(running: list[Line], evaluating: list[Line]) -> Decision | None:
    """The comparison that decides whether the innermost line of a stack runs, by a value that comes
    from a loop; the nearest one.

    Args:
        running: the stack; evaluating: the one in which the loop began.
    """
    began = Stack(evaluating)
    loop = Loop(began)
    if loop.node is None:
        return None
    search, stack = _Decisions(began, loop), Stack(running)
    for depth, (_, line) in enumerate(running):
        function = stack.functions[depth]
        for test in _conditions(function, line) if function is not None else ():
            if found := search.compared(Expression(stack, depth, test), set()):
                return None if may_exchange(search) else found
    return None


class _Decisions(Search):
    """A search for the comparison that decides."""

    def compared(self, of: Expression, seen: set[ast.AST], truth: bool = True) -> Decision | None:
        """The comparison that an expression depends on.

        Args:
            truth: it is only asked whether it is true, so that a call in it may compare:
                `if tracker.is_better(value):`.
        """
        if of.node in seen or self.left <= 0:
            return None
        seen.add(of.node)
        self.left -= 1
        for sides in ordered(ast.walk(of.node)):
            reached = {hops: s for s in reversed(sides) if (hops := self.reach(of, s)) is not None}
            if reached:
                return _decided(of, reached[min(reached)])
        asked = list(_asked(of.node)) if truth else []
        for call in asked:
            if isinstance(call, ast.Call) and called_name(call) not in (*NO_RESULT, *CHOOSE):
                for value in given(call):
                    if self.reach(of, value) is not None:
                        return _decided(of, value)
        for name in names(of.node):
            for node, definition in self.definitions(of._replace(node=name)):
                if found := self.compared(definition, seen, name in asked):
                    return found
                for test in self._around(definition, node):
                    if found := self.compared(test, seen):
                        return found
        return None

    def _around(self, of: Expression, node: ast.AST) -> Iterator[Expression]:
        """The conditions under which a node of the function at a depth runs."""
        line: int = node.lineno  # type: ignore[attr-defined]
        for test in _conditions(of.function, line) if of.function is not None else ():
            yield of._replace(node=test)


def _decided(of: Expression, value: ast.expr) -> Decision:
    return Decision(of.stack.lines[of.depth][0], bare(value), value.lineno)


def _asked(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of a condition that are joined by `and`, `or` and `not`."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _asked(value)
    elif isinstance(node, ast.UnaryOp):
        yield from _asked(node.operand)
    else:
        yield node


def _conditions(function: ast.AST, line: int) -> list[ast.expr]:
    """The tests of the `if`s around a line of a function, and of those before it in the same block
    that return; innermost first."""
    found: list[ast.expr] = []
    block: list[ast.stmt] = getattr(function, "body", [])
    while isinstance(block, list):
        around = [s for s in block if spans(s, line)]
        found += [
            s.test
            for s in block
            if isinstance(s, ast.If)
            and (s.end_lineno or 0) < line
            and isinstance(s.body[-1], (ast.Return, ast.Continue, ast.Break))
        ]
        if not around or isinstance(around[-1], ast.ClassDef | Function):
            break
        node = around[-1]
        if isinstance(node, ast.If) and any(spans(s, line) for s in (*node.body, *node.orelse)):
            found.append(node.test)
        blocks = [getattr(node, f, []) for f in ("body", "orelse", "finalbody")]
        blocks += [h.body for h in getattr(node, "handlers", ())]
        block = next((b for b in blocks if any(spans(s, line) for s in b)), [])
        if not block:
            break
    return found[::-1]


def compared(code: CodeType) -> tuple[ast.expr, ...]:
    """The variables and attributes that a function compares by `<` and the like, each once."""
    source = source_of(code.co_filename)
    function = source.function(code) if source is not None else None
    if source is None or function is None:
        return ()
    return source.once(_compared, function)


def _compared(source: Source, function: ast.AST) -> tuple[ast.expr, ...]:
    sides = map(bare, (s for sides in ordered(own_nodes(function)) for s in sides))
    found = {ast.unparse(side): side for side in sides if isinstance(side, _VALUES)}
    return tuple(found.values())[:COMPARED_AT_MOST]


def ordered(nodes: Iterable[ast.AST]) -> Iterator[list[ast.expr]]:
    """The operands of each comparison among some nodes that is by order, or with a minimum or
    maximum (`loss == min(losses)`)."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(s, ast.Call) and called_name(s) in CHOOSE for s in sides) or all(
                isinstance(o, _ORDERS) for o in node.ops
            ):
                yield sides


_VALUES = (ast.Name, ast.Attribute, ast.Subscript)


def bare(node: ast.expr) -> ast.expr:
    """`x` for `float(x)`, `x.item()`, `-x` and `(x := y)`."""
    if isinstance(node, ast.UnaryOp):
        return bare(node.operand)
    if isinstance(node, ast.NamedExpr):
        return node.target
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item":
            return bare(node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1:
            return bare(node.args[0])
    return node


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
