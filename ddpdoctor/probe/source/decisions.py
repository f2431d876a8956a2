"""Which values does a function compare, and which of them, a result of an evaluation, decides
whether a line runs, or a loop around the evaluation ends? And does a line write a result to a
file?
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from ..recording.code_locations import classify
from .ast_cache import Function, Source, called_name, dotted, given, own_nodes, source_of, spans
from .call_resolver import Scope, resolve
from .dependence import NO_RESULT, Expression, Line, Loop, Search, Stack, names

COMPARED_AT_MOST = 8
"""Values of one function: more are compared in code that works on data."""

CHOOSE = ("min", "max")
_ASSIGNED = (ast.Assign, ast.AnnAssign)
_JUMPS = (ast.Return, ast.Continue, ast.Break)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


_ASKS_A_STORE = ("get", "multi_get", "add", "wait", "compare_set")
"""Methods of a store of `torch.distributed`, by which ranks may exchange values."""
_READS = ("open", "load", "loadtxt", "read_text", "read_bytes", "fromfile", "memmap")
"""Functions that read a file, which another rank may have written."""


class Decision(NamedTuple):
    """A comparison that decides.

    Attributes:
        code: the function with it.
        value: the operand that comes from the evaluation; `line` is that of the comparison.
    """

    code: CodeType
    value: ast.expr
    line: int


def deciding(
    running: list[Line], evaluating: list[Line], scopes: Sequence[Scope] = ()
) -> Decision | None:
    """The comparison that decides whether the innermost line of a stack runs, by a value that comes
    from a loop; the nearest one.

    Args:
        running: the stack; evaluating: the one in which the loop began.
        scopes: the variables of `running`.
    """
    began = Stack(evaluating)
    loop = Loop(began)
    if loop.node is None:
        return None
    search, stack = _Decisions(began, loop), Stack(running, scopes)
    for depth, (_, line) in enumerate(running):
        function = stack.functions[depth]
        for test in _conditions(function, line) if function is not None else ():
            if found := search.compared(Expression(stack, depth, test), set()):
                return None if may_exchange(search) else found
    return None


def ending(evaluating: list[Line], scopes: list[Scope]) -> tuple[Decision, Line] | None:
    """The comparison that decides whether a loop around an evaluation is left, by a value that
    comes from the evaluation, and the line that leaves it; of the innermost loop that has one.

    What else has to hold there is looked up: a way out that is switched off is none.

    Args:
        evaluating: the stack in which the loop of the evaluation began, with the variables there.
    """
    stack = Stack(evaluating, scopes)
    loop = Loop(stack)
    if loop.node is None:
        return None
    for depth, (code, line) in enumerate(evaluating):
        function = stack.functions[depth]
        nodes = own_nodes(function) if function is not None else []
        around = [n for n in nodes if isinstance(n, _LOOPS) and any(spans(s, line) for s in n.body)]
        for left in reversed(around):
            for leaves, conditions in _ways_out(left):
                way = _WayOut(stack, depth, loop, scopes[depth])
                if all(way.may_hold(*c) for c in conditions) and way.found is not None:
                    return None if may_exchange(way.search) else (way.found, (code, leaves))
    return None


_LOOPS = (ast.For, ast.While)
_BLOCKS = ("body", "orelse", "finalbody")

_Conditions = tuple[tuple[ast.expr, bool], ...]
"""Tests, each with whether it has to be true."""


def _ways_out(loop: ast.For | ast.While) -> Iterator[tuple[int, _Conditions]]:
    """The lines that leave a loop, with the conditions under which they do."""
    if isinstance(loop, ast.While):
        yield loop.lineno, ((loop.test, False),)
    yield from _leaving(loop.body, (), nested=False)


def _leaving(
    block: list[ast.stmt], under: _Conditions, *, nested: bool
) -> Iterator[tuple[int, _Conditions]]:
    """The statements of a block that leave the loop around it.

    Args:
        nested: the block is in another loop inside that one, which `break` leaves.
    """
    for statement in block:
        if isinstance(statement, ast.Return) or (isinstance(statement, ast.Break) and not nested):
            yield statement.lineno, under
        elif isinstance(statement, ast.If):
            test = statement.test
            yield from _leaving(statement.body, (*under, (test, True)), nested=nested)
            yield from _leaving(statement.orelse, (*under, (test, False)), nested=nested)
            if isinstance(statement.body[-1], _JUMPS):
                under = (*under, (test, False))
        elif isinstance(statement, (ast.With, ast.AsyncWith, ast.Try)):
            yield from _leaving(statement.body, under, nested=nested)
        elif isinstance(statement, _LOOPS):
            yield from _leaving(statement.body, under, nested=True)


class _WayOut:
    """A way out of a loop.

    Attributes:
        found: the comparison that decides about it, of the conditions asked so far.
    """

    def __init__(self, stack: Stack, depth: int, loop: Loop, scope: Scope) -> None:
        self.stack = stack
        self.depth = depth
        self.scope = scope
        self.search = _Decisions(stack, loop)
        self.found: Decision | None = None

    def may_hold(self, test: ast.expr, wanted: bool) -> bool:
        """Whether a condition is as wanted now, or depends on the evaluation."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.may_hold(test.operand, not wanted)
        if isinstance(test, ast.BoolOp):
            every = isinstance(test.op, ast.And) is wanted
            parts = [self.may_hold(value, wanted) for value in test.values]
            return all(parts) if every else any(parts)
        found = self.search.compared(Expression(self.stack, self.depth, test), set())
        self.found = self.found or found
        return found is not None or _truth(test, self.scope) is wanted


def _truth(test: ast.expr, scope: Scope) -> bool | None:
    """Whether a condition holds; None if that is not known."""
    if not isinstance(test, ast.Compare):
        value = resolve(test, scope)
        return bool(value) if isinstance(value, _PLAIN) else None
    kind, *more = test.ops
    left, right = resolve(test.left, scope), resolve(test.comparators[0], scope)
    if isinstance(kind, ast.IsNot) and ast.unparse(test.comparators[0]) == "None":
        return True if left is not None else None
    alike = isinstance(left, str) is isinstance(right, str)
    if more or not (isinstance(left, _PLAIN) and isinstance(right, _PLAIN) and alike):
        return None
    return _COMPARE[type(kind)](left, right) if type(kind) in _COMPARE else None


_PLAIN = (bool, int, float, str)
"""Types whose comparison runs no code of the user's."""

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


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
            and isinstance(s.body[-1], _JUMPS)
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


def may_exchange(search: Search) -> bool:
    """Whether a value that was searched for may have been put together with those of other ranks
    by other means than collectives and messages, which are recorded: in a store, in files, or in a
    function that the source does not name."""
    for way in search.ways:
        if any(_exchanges(node) for body in way.methods() for node in ast.walk(body)):
            return True
        for of, call in way.passed_on():
            source = of.stack.source(of.depth)
            if not dotted(call.func) and not isinstance(call.func, ast.Attribute):
                return True
            files = [source, *source.once(_imported, source.tree)] if source is not None else []
            bodies = (body for file in files for body in file.defined.get(called_name(call), ()))
            if any(_exchanges(node) for body in bodies for node in ast.walk(body)):
                return True
    return False


def _imported(source: Source, tree: ast.AST) -> list[Source]:
    """The other files of the program that a file imports."""
    names: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(alias.name for alias in node.names)}
    found: list[Source] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.rpartition(".")[2] not in {n.rpartition(".")[2] for n in names} or not file:
            continue
        if classify(file) == "user" and (other := source_of(file)) is not None:
            found.append(other)
    return found


def _exchanges(node: ast.AST) -> bool:
    """Whether a node reads a file, or asks a store."""
    if not isinstance(node, ast.Call):
        return False
    owner = dotted(node.func).rpartition(".")[0].lower()
    asks = called_name(node) in _ASKS_A_STORE and "store" in owner
    return asks or called_name(node) in _READS


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
    nodes = own_nodes(function)
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
