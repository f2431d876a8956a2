"""Which comparison of a result of an evaluation decides whether a line of the program runs?

The source of the running functions is searched backwards: from the conditions around the line to
what their names were assigned, to the arguments that callers gave and to what functions returned,
until a value is met that the loop of the evaluation assigned. Nothing of the user's is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple, TypeAlias

from .ast_cache import (
    Function,
    Source,
    called_name,
    covers_line,
    dotted,
    function_of,
    given,
    own_nodes,
    source_of,
)
from .comparisons import CHOOSE, bare, ordered

STEPS = 400
"""Expressions looked at in one search."""

_NO_RESULT = (
    "len", "isnan", "isfinite", "isinf", "isinstance", "hasattr", "get_rank", "range", "time",
    "monotonic", "perf_counter",
)  # fmt: skip
"""Calls that do not return their argument in another form."""
_KNOWN = ("append", "update", "add", "extend", "insert", "step", "push", "setdefault")
"""Methods that hand their arguments over to their object."""

Line: TypeAlias = tuple[CodeType, int]
"""A running function and the line that it executes. A list of them is a stack, innermost first."""


class Decision(NamedTuple):
    """A comparison that decides.

    Attributes:
        code: the function with it.
        value: the operand that comes from the evaluation; `line` is that of the comparison.
    """

    code: CodeType
    value: ast.expr
    line: int


class _Expression(NamedTuple):
    """An expression of the function at a depth of a stack."""

    stack: _Stack
    depth: int
    node: ast.expr

    @property
    def function(self) -> ast.AST | None:
        return self.stack.functions[self.depth]

    def decided(self, value: ast.expr) -> Decision:
        return Decision(self.stack.lines[self.depth][0], bare(value), value.lineno)


class _Stack:
    """The functions of a stack.

    Attributes:
        functions: the definitions, None for those without source.
    """

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.functions = [function_of(code) for code, _ in lines]

    def source(self, depth: int) -> Source | None:
        return source_of(self.lines[depth][0].co_filename)

    def statements(self, depth: int) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
        """The nodes of a function that give something a value, with these values."""
        function = self.functions[depth]
        for node in own_nodes(function) if function is not None else ():
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
                yield node, [node.value] if node.value is not None else []
            elif isinstance(node, ast.For):
                yield node.target, [node.iter]
            elif isinstance(node, ast.Call) and called_name(node) in _KNOWN:
                yield node, given(node)


def deciding(running: list[Line], evaluating: list[Line]) -> Decision | None:
    """The comparison that decides whether the innermost line of a stack runs, by a value that comes
    from a loop; the nearest one.

    Args:
        running: the stack; evaluating: the one in which the loop began.
    """
    return _Search(_Stack(running), _Stack(evaluating)).decision()


class _Search:
    """
    Attributes:
        loop: the loop of the evaluation, and in which of its functions; None if it is not found.
        left: expressions that may still be looked at.
    """

    def __init__(self, running: _Stack, evaluating: _Stack) -> None:
        self.running = running
        self.evaluating = evaluating
        self.left = STEPS
        function, (_, line) = evaluating.functions[0], evaluating.lines[0]
        self.loop = None
        for node in own_nodes(function) if function is not None else ():
            if isinstance(node, (ast.For, ast.comprehension)) and _spans(node.iter, line):
                self.loop = node

    def decision(self) -> Decision | None:
        if self.loop is None:
            return None
        for depth, (_, line) in enumerate(self.running.lines):
            function = self.running.functions[depth]
            for test in _conditions(function, line) if function is not None else ():
                if found := self._compared(_Expression(self.running, depth, test), set()):
                    return found
        return None

    def _compared(self, of: _Expression, seen: set[ast.AST], truth: bool = True) -> Decision | None:
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
            reached = {hops: s for s in reversed(sides) if (hops := self._reach(of, s)) is not None}
            if reached:
                return of.decided(reached[min(reached)])
        asked = list(_asked(of.node)) if truth else []
        for call in asked:
            if isinstance(call, ast.Call) and called_name(call) not in (*_NO_RESULT, *CHOOSE):
                for value in given(call):
                    if self._reach(of, value) is not None:
                        return of.decided(value)
        for name in _names(of.node):
            for node, definition in self._definitions(of._replace(node=name)):
                if found := self._compared(definition, seen, name in asked):
                    return found
                for test in self._around(definition, node):
                    if found := self._compared(test, seen):
                        return found
        return None

    def _around(self, of: _Expression, node: ast.AST) -> Iterator[_Expression]:
        """The conditions under which a node of the function at a depth runs."""
        line: int = node.lineno  # type: ignore[attr-defined]
        for test in _conditions(of.function, line) if of.function is not None else ():
            yield of._replace(node=test)

    def _reach(self, of: _Expression, node: ast.expr) -> int | None:
        """Over how many assignments an expression gets its value from the loop; None if it does
        not."""
        if any(called_name(c) in _NO_RESULT for c in ast.walk(node) if isinstance(c, ast.Call)):
            return None
        layer, seen, hops = [of._replace(node=node)], set[tuple[int, str]](), 0
        while layer and self.left > 0:
            following: list[_Expression] = []
            for expression in layer:
                self.left -= 1
                following += self._returned(expression)
                for name in _names(expression.node):
                    function = expression.function
                    key = id(function), ast.unparse(name)
                    if key in seen:
                        continue
                    seen.add(key)
                    for where, definition in self._definitions(expression._replace(node=name)):
                        if self._in_loop(definition, where):
                            return hops
                        following.append(definition)
                if self._is_loop(expression):
                    return hops
            layer, hops = following, hops + 1
        return None

    def _in_loop(self, of: _Expression, node: ast.AST) -> bool:
        """Whether a node is in the body of the loop of the evaluation."""
        loop = self.loop
        if of.function is not self.evaluating.functions[0]:
            return False
        body = loop.body if isinstance(loop, ast.For) else ()
        return any(n is node for s in body for n in ast.walk(s))

    def _is_loop(self, of: _Expression) -> bool:
        """Whether an expression is, or contains, the loop of the evaluation."""
        return isinstance(self.loop, ast.comprehension) and any(
            n is self.loop for n in ast.walk(of.node)
        )

    def _returned(self, of: _Expression) -> list[_Expression]:
        """What the function returned that the expression called in which the evaluation ran."""
        function = of.function
        found: list[_Expression] = []
        for depth, (_, line) in enumerate(self.evaluating.lines[1:]):
            called = self.evaluating.functions[depth]
            calls = [n for n in ast.walk(of.node) if isinstance(n, ast.Call) and _spans(n, line)]
            if self.evaluating.functions[depth + 1] is not function or not calls:
                continue
            for node in own_nodes(called) if called is not None else ():
                if isinstance(node, ast.Return) and node.value is not None:
                    found.append(_Expression(self.evaluating, depth, node.value))
        return found

    def _definitions(self, of: _Expression) -> Iterator[tuple[ast.AST, _Expression]]:
        """The statements that give a variable or an attribute its value, and what they are."""
        key = of.node.slice if isinstance(of.node, ast.Subscript) else None
        whole = of.node.value if isinstance(of.node, ast.Subscript) else of.node
        name = ast.unparse(whole)
        if isinstance(whole, ast.Attribute):
            for stack in (of.stack, self.evaluating):
                for depth in range(len(stack.lines)):
                    yield from _assigned(stack, depth, name, key)
            return
        own = list(_assigned(of.stack, of.depth, name, key))
        yield from own
        if (passed := self._passed(of, name)) is not None:
            for e in passed:
                entry = e.node if key is None else ast.Subscript(e.node, key, ast.Load())
                yield e.node, e._replace(node=ast.copy_location(entry, e.node))
        elif not own or _is_declared(of.function, name):
            for depth in range(of.depth + 1, len(of.stack.lines)):
                if _encloses(of.stack, depth, of.depth):
                    yield from _assigned(of.stack, depth, name, key)

    def _passed(self, of: _Expression, name: str) -> list[_Expression] | None:
        """What the caller gave for a parameter; None for a variable that is none."""
        function = of.function
        if not isinstance(function, Function):
            return None
        arguments = function.args
        plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if name not in [*plain, *(a.arg for a in arguments.kwonlyargs)]:
            return None
        outer = of.depth + 1
        if outer >= len(of.stack.lines) or (caller := of.stack.functions[outer]) is None:
            return []
        line = of.stack.lines[outer][1]
        calls = [n for n in own_nodes(caller) if isinstance(n, ast.Call) and _spans(n, line)]
        known = getattr(function, "name", "")
        named = [c for c in calls if called_name(c) == known] or (
            calls[:1] if known.startswith("__") else []
        )
        if not named:
            return []
        call = named[0]
        given_by_name = [k.value for k in call.keywords if k.arg == name]
        if given_by_name or name not in plain:
            return [_Expression(of.stack, outer, v) for v in given_by_name]
        place = plain.index(name) - (plain[0] in ("self", "cls"))
        return [_Expression(of.stack, outer, v) for v in call.args[place : place + 1]]


def _assigned(
    stack: _Stack, depth: int, name: str, key: ast.expr | None
) -> Iterator[tuple[ast.AST, _Expression]]:
    """What a function assigns to a variable or attribute, or to an entry of it, or what else it
    changes it with.

    Args:
        key: of the entry that is asked for; None for the whole.
    """
    for node, values in stack.statements(depth):
        for target, into in _targets(node):
            if target == name and (into is None or key is None or _same(into, key)):
                for value in values:
                    part = value if into is not None else _entry(value, key)
                    if part is not None:
                        yield node, _Expression(stack, depth, part)


def _entry(value: ast.expr, key: ast.expr | None) -> ast.expr | None:
    """The entry of a dictionary that is written out; of anything else the whole."""
    if key is None or not isinstance(value, ast.Dict) or None in value.keys:
        return value
    entries = zip(value.keys, value.values, strict=True)
    return next((v for k, v in entries if k is not None and _same(k, key)), None)


def _same(key: ast.expr, other: ast.expr) -> bool:
    """Whether two keys may be the same."""
    constant = isinstance(key, ast.Constant) and isinstance(other, ast.Constant)
    return not constant or ast.unparse(key) == ast.unparse(other)


def _targets(node: ast.AST) -> list[tuple[str, ast.expr | None]]:
    """The variables and attributes that a node gives a value, with the key of the entry, or None
    for the whole."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = [*node.targets]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value]
    else:
        targets = [node] if isinstance(node, ast.expr) else []
    found: list[tuple[str, ast.expr | None]] = []
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        elif isinstance(target, ast.Subscript):
            found.append((ast.unparse(target.value), target.slice))
        elif isinstance(target, (ast.Name, ast.Attribute)):
            found.append((ast.unparse(target), None))
    return found


def _names(node: ast.expr) -> Iterator[ast.expr]:
    """The variables and dotted names that an expression reads, but for what it calls."""
    if isinstance(node, ast.Call):
        if called_name(node) in _NO_RESULT:
            return
        if isinstance(node.func, ast.Attribute):
            yield from _names(node.func.value)  # `loss.item()`, `meter.compute()`
        for value in given(node):
            yield from _names(value)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield node if dotted(node.value) else node.value
    elif isinstance(node, ast.Attribute) and dotted(node):
        yield node
        yield from _names(node.value)
    elif isinstance(node, ast.Name):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _names(child)


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
        around = [s for s in block if _spans(s, line)]
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
        if isinstance(node, ast.If) and any(_spans(s, line) for s in (*node.body, *node.orelse)):
            found.append(node.test)
        blocks = [getattr(node, f, []) for f in ("body", "orelse", "finalbody")]
        blocks += [h.body for h in getattr(node, "handlers", ())]
        block = next((b for b in blocks if any(_spans(s, line) for s in b)), [])
        if not block:
            break
    return found[::-1]


def _is_declared(function: ast.AST | None, name: str) -> bool:
    """Whether a function says `global name` or `nonlocal name`."""
    return function is not None and any(
        isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names for n in own_nodes(function)
    )


def _encloses(stack: _Stack, depth: int, inner: int) -> bool:
    """Whether the variables of one function are known in another one: it is around it, or is the
    file itself."""
    outer, function, source = stack.functions[depth], stack.functions[inner], stack.source(inner)
    if outer is None or source is None or stack.source(depth) is not source:
        return False
    while function is not None and function is not outer:
        function = source.parents.get(function)
    return function is outer


def _spans(node: ast.AST, line: int) -> bool:
    return hasattr(node, "lineno") and covers_line(node, line)
