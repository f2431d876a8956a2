"""Does a value come from a loop that ran before, or from a call?

The source of the running functions is searched backwards: from an expression to what its names were
assigned, to the arguments that callers gave and to what functions returned, until a value is met
that the loop assigned, or the call gave. Nothing of the user's is executed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import NamedTuple, Protocol, TypeAlias

from .ast_cache import (
    Function,
    Source,
    attribute_of,
    called_name,
    dotted,
    function_of,
    given,
    own_nodes,
    own_of,
    owner_of,
    reaches,
    results_of,
    source_of,
    spans,
)
from .call_graph import is_users, methods_called
from .call_resolver import Scope, resolve

STEPS = 400
"""Expressions looked at in one search."""
METHODS_DEEP = 3
"""How many calls of methods that have returned are followed."""

NO_RESULT = (
    "len", "isnan", "isfinite", "isinf", "isinstance", "hasattr", "get_rank", "range", "time",
    "monotonic", "perf_counter",
)  # fmt: skip
"""Calls that do not return their argument in another form."""
_KNOWN = ("append", "update", "add", "extend", "insert", "step", "push", "setdefault")
"""Methods that hand their arguments over to their object."""
INTO = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")
"""Functions of `torch.distributed` that write their result into the first argument."""

_NOT_KEPT = (*_KNOWN, *INTO, "write", "dump", "put", "send", "set", "save", "store", "publish")
"""What hands its arguments to a file, a store or another process, or is known above."""

Line: TypeAlias = tuple[CodeType, int]
"""A running function and the line that it executes. A list of them is a stack, innermost first."""


class Expression(NamedTuple):
    """An expression of the function at a depth of a stack."""

    stack: Stack
    depth: int
    node: ast.expr

    @property
    def function(self) -> ast.AST | None:
        return self.stack.functions[self.depth]


class Link(NamedTuple):
    """An expression on the way from one that was asked about to the target.

    Attributes:
        before: what it is a part of the value of; None for the first.
        name: the variable in it that leads on, and `made` all that is ever assigned to that.
    """

    of: Expression
    before: Link | None = None
    name: ast.expr | None = None
    made: tuple[Expression, ...] = ()

    def passed_on(self) -> Iterator[tuple[Expression, ast.Call]]:
        """The calls that are given the value, and what they are a part of."""
        for of in (self.of, *self.made):
            for call in ast.walk(of.node):
                if isinstance(call, ast.Call) and self._takes(call):
                    yield of, call
        if self.before is not None:
            yield from self.before.passed_on()

    def methods(self) -> Iterator[ast.AST]:
        """The methods that have returned and that the value went through."""
        stack = self.of.stack
        yield from (f for f in stack.functions[: len(stack.owners)] if f is not None)
        if self.before is not None:
            yield from self.before.methods()

    def _takes(self, call: ast.Call) -> bool:
        """Whether a call is given the variable, or the result of another call where there is
        none."""
        values = [part for value in given(call) for part in ast.walk(value)]
        if self.name is None:
            return any(isinstance(part, ast.Call) for part in values)
        name = ast.unparse(self.name)
        return any(isinstance(p, type(self.name)) and ast.unparse(p) == name for p in values)


class Stack:
    """The functions of a stack.

    Attributes:
        scopes: the variables of the innermost functions, as far as they are known.
        functions: the definitions, None for those without source.
        owners: the innermost functions are methods that were called and have returned, of these
            objects, as each one's caller writes it.
    """

    def __init__(self, lines: list[Line], scopes: Sequence[Scope] = ()) -> None:
        self.lines = lines
        self.scopes = scopes
        self.functions = [function_of(code) for code, _ in lines]
        self.owners: list[ast.expr] = []

    def within(self, depth: int, owner: ast.expr, method: CodeType, line: int) -> Stack:
        """The stack in a method of an object that a function calls on a line."""
        own = Scope(dict.fromkeys(method.co_varnames[:1], resolve(owner, self.scopes[depth])), {})
        lines = [(method, method.co_firstlineno), (self.lines[depth][0], line)]
        stack = Stack([*lines, *self.lines[depth + 1 :]], [own, *self.scopes[depth:]])
        stack.owners = [owner, *self.owners[depth:]]
        return stack

    def in_caller(self, depth: int, read: ast.Attribute) -> Expression | None:
        """What an attribute of its object, which a method that has returned reads, is in the
        function that called the method."""
        if depth >= len(self.owners) or ast.unparse(read.value) not in self.scopes[depth].names:
            return None
        return Expression(self, depth + 1, attribute_of(self.owners[depth], read))

    def source(self, depth: int) -> Source | None:
        return source_of(self.lines[depth][0].co_filename)

    def given(self, depth: int, name: str) -> list[Given]:
        """What a function assigns to a variable or attribute, and to entries of it."""
        function, source = self.functions[depth], self.source(depth)
        if function is None or source is None:
            return []
        return source.once(_given, function).get(name, [])


class Given(NamedTuple):
    """A statement that gives something a value.

    Attributes:
        into: the key of the entry that gets it, None for the whole.
        values: what it may get.
    """

    node: ast.AST
    into: ast.expr | None
    values: list[ast.expr]


def _given(source: Source, function: ast.AST) -> dict[str, list[Given]]:
    """By variable or attribute of a function, the statements that give it a value; by `a.`, those
    that give an attribute of `a` one."""
    found: dict[str, list[Given]] = {}
    for node, values in _statements(function):
        for target, into, alone in _targets(node):
            acts = isinstance(node, ast.Call) and called_name(node) not in _KNOWN
            if acts and target in source.imported:  # `json.dump(x, f)` leaves nothing in `json`
                continue
            got = values if alone is None else [alone]
            found.setdefault(target, []).append(Given(node, into, got))
            for end in (i for i, letter in enumerate(target) if letter == "."):
                found.setdefault(target[: end + 1], []).append(Given(node, None, got))
    return found


def _statements(function: ast.AST) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """The nodes of a function that give something a value, with these values."""
    for node in own_nodes(function):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            yield node, [node.value] if node.value is not None else []
        elif isinstance(node, ast.For):
            yield node.target, [node.iter]
        elif isinstance(node, ast.Call) and called_name(node) in _KNOWN:
            yield node, given(node)
        elif isinstance(node, ast.Call) and called_name(node) in INTO:
            yield node, [node]
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            # Its result is not used: it is called for what it does to its object.
            yield call, given(call) if called_name(call) not in _NOT_KEPT else []


class Loop:
    """The values that the loop on the innermost line of a stack assigns; of one in a generator, the
    loop that iterates over it."""

    def __init__(self, stack: Stack) -> None:
        self.function: ast.AST | None = None
        self.node: ast.For | ast.comprehension | None = None
        for (code, line), function in zip(stack.lines, stack.functions, strict=True):
            for node in own_nodes(function) if function is not None else ():
                if isinstance(node, (ast.For, ast.comprehension)) and spans(node.iter, line):
                    self.function, self.node = function, node
            if not code.co_flags & inspect.CO_GENERATOR and code.co_name != "__iter__":
                break

    def assigned(self, of: Expression, node: ast.AST) -> bool:
        """Whether a statement that gives a variable of a function this value is one of them."""
        body = self.node.body if isinstance(self.node, ast.For) else ()
        mine = of.function is self.function
        return mine and any(n is node for s in body for n in ast.walk(s))

    def within(self, of: Expression) -> bool:
        """Whether an expression contains the loop."""
        comprehension = isinstance(self.node, ast.comprehension)
        return comprehension and any(n is self.node for n in ast.walk(of.node))


class Target(Protocol):
    """The values that are searched for."""

    def assigned(self, of: Expression, node: ast.AST) -> bool:
        """Whether a statement that gives a variable of a function this value is one of them."""

    def within(self, of: Expression) -> bool:
        """Whether an expression contains what gives them."""


class Search:
    """
    Attributes:
        stack: that of the target: the values that are searched for.
        left: expressions that may still be looked at.
        ways: those that led to the target.
    """

    def __init__(self, stack: Stack, target: Target) -> None:
        self.stack = stack
        self.target = target
        self.left = STEPS
        self.ways: list[Link] = []

    def reach(self, of: Expression, node: ast.expr) -> int | None:
        """Over how many assignments an expression gets its value from the target; None if it does
        not."""
        if any(called_name(c) in NO_RESULT for c in ast.walk(node) if isinstance(c, ast.Call)):
            return None
        layer = [Link(of._replace(node=node))]
        seen, hops = set[tuple[int, str]](), 0
        while layer and self.left > 0:
            following: list[Link] = []
            for way in layer:
                self.left -= 1
                following += [Link(e, way) for e in self._returned(way.of)]
                for name in names(way.of.node):
                    key = id(way.of.function), ast.unparse(name)
                    if key in seen:
                        continue
                    seen.add(key)
                    made = [*self.definitions(way.of._replace(node=name))]
                    here = Link(way.of, way.before, name, tuple(e for _, e in made))
                    if any(self.target.assigned(e, where) for where, e in made):
                        self.ways.append(here)
                        return hops
                    following += [Link(e, here) for _, e in made]
                if self.target.within(way.of):
                    self.ways.append(way)
                    return hops
            layer, hops = following, hops + 1
        return None

    def _returned(self, of: Expression) -> list[Expression]:
        """What the function returns that the expression calls, and that led to the target."""
        function = of.function
        found: list[Expression] = []
        for depth, (_, line) in enumerate(self.stack.lines[1:]):
            called = self.stack.functions[depth]
            calls = [n for n in ast.walk(of.node) if isinstance(n, ast.Call) and spans(n, line)]
            if self.stack.functions[depth + 1] is not function or not calls:
                continue
            if called is not None:
                found += [Expression(self.stack, depth, e) for e in results_of(called)]
        return found

    def definitions(self, of: Expression) -> Iterator[tuple[ast.AST, Expression]]:
        """The statements that give a variable or an attribute its value, and what they are."""
        if isinstance(of.node, ast.Call):  # a method, which may read any attribute
            yield from _assigned(of.stack, of.depth, owner_of(of.node) + ".", None)
            return
        key = of.node.slice if isinstance(of.node, ast.Subscript) else None
        whole = of.node.value if isinstance(of.node, ast.Subscript) else of.node
        name = ast.unparse(whole)
        if isinstance(whole, ast.Attribute):
            for stack in (of.stack, self.stack):
                for depth in range(len(stack.lines)):
                    yield from _assigned(stack, depth, name, key)
            yield from self._by_methods(of, whole, key)
            if (outer := of.stack.in_caller(of.depth, whole)) is not None:
                yield from self.definitions(outer._replace(node=_part(outer.node, key)))
            return
        function, own = of.function, list(_assigned(of.stack, of.depth, name, key))
        if function is not None and not _is_declared(function, name):
            own = [a for a in own if reaches(function, a[0], of.node)]
        yield from own
        yield from self._changed_within(of.function, name, key)
        if (passed := self._passed(of, name)) is not None:
            yield from ((e.node, e._replace(node=_part(e.node, key))) for e in passed)
        elif not own or _is_declared(function, name):
            for depth in range(of.depth + 1, len(of.stack.lines)):
                if _encloses(of.stack, depth, of.depth):
                    yield from _assigned(of.stack, depth, name, key)
                    yield from self._changed_within(of.stack.functions[depth], name, key)

    def _by_methods(
        self, of: Expression, read: ast.Attribute, key: ast.expr | None
    ) -> Iterator[tuple[ast.AST, Expression]]:
        """What the methods that a function calls of an object assign to an attribute of it, or what
        the attribute returns where it is a property."""
        stack, depth, function = of.stack, of.depth, of.function
        if depth >= len(stack.scopes) or len(stack.owners) - depth > METHODS_DEEP:
            return
        owner = resolve(read.value, stack.scopes[depth])
        computed = inspect.getattr_static(type(owner), read.attr, None)
        getter = getattr(computed, "fget", None) if isinstance(computed, property) else None
        if isinstance(getter, FunctionType) and is_users(getter):
            inside = stack.within(depth, read.value, getter.__code__, read.lineno)
            for result in results_of(inside.functions[0]):
                yield result, Expression(inside, 0, result)
        name = ast.unparse(read.value)
        for call, method in methods_called(function, name, owner) if function is not None else ():
            if is_users(method):
                inside = stack.within(depth, read.value, method.__code__, call.lineno)
                for first in method.__code__.co_varnames[:1]:
                    yield from _assigned(inside, 0, f"{first}.{read.attr}", key)
                    own = attribute_of(ast.copy_location(ast.Name(first, ast.Load()), call), read)
                    yield from self._by_methods(Expression(inside, 0, own), own, key)

    def _changed_within(
        self, function: ast.AST | None, name: str, key: ast.expr | None
    ) -> Iterator[tuple[ast.AST, Expression]]:
        """What the target's stack does to a variable of a function in functions inside that one."""
        for depth, (code, _) in enumerate(self.stack.lines):
            inner, source = self.stack.functions[depth], self.stack.source(depth)
            if source is None or name in (*code.co_varnames, *code.co_cellvars):
                continue
            if inner is not function and _is_inside(source, inner, function):
                yield from _assigned(self.stack, depth, name, key)

    def _passed(self, of: Expression, name: str) -> list[Expression] | None:
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
        calls = [n for n in own_of(caller, ast.Call) if spans(n, line)]
        known = getattr(function, "name", "")
        named = [c for c in calls if called_name(c) == known] or (
            calls[:1] if known.startswith("__") or known == "forward" else []
        )
        if not named:
            return []
        call = named[0]
        given_by_name = [k.value for k in call.keywords if k.arg == name]
        if given_by_name or name not in plain:
            return [Expression(of.stack, outer, v) for v in given_by_name]
        place = plain.index(name) - (plain[0] in ("self", "cls"))
        return [Expression(of.stack, outer, v) for v in call.args[place : place + 1]]


def _assigned(
    stack: Stack, depth: int, name: str, key: ast.expr | None
) -> Iterator[tuple[ast.AST, Expression]]:
    """What a function assigns to a variable or attribute, or to an entry of it, or what else it
    changes it with.

    Args:
        key: of the entry that is asked for; None for the whole.
    """
    for node, into, values in stack.given(depth, name):
        if into is None or key is None or _same(into, key):
            for value in values:
                part = value if into is not None else _entry(value, key)
                if part is not None:
                    yield node, Expression(stack, depth, part)


def _part(whole: ast.expr, key: ast.expr | None) -> ast.expr:
    """An entry of what an expression gives; the whole for None."""
    if key is None:
        return whole
    return ast.copy_location(ast.Subscript(whole, key, ast.Load()), whole)


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


def _targets(node: ast.AST) -> list[tuple[str, ast.expr | None, ast.expr | None]]:
    """The variables and attributes that a node gives a value, with the key of the entry, or None
    for the whole, and the value of that one alone in `a, b = 1, 2`."""
    alone: ast.expr | None = None
    if isinstance(node, ast.Assign):
        targets, alone = [*node.targets], node.value
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and called_name(node) in INTO:
        targets = node.args[:1]
    elif isinstance(node, ast.Call):
        targets = [node.func.value if isinstance(node.func, ast.Attribute) else node.func]
    else:
        targets = [node] if isinstance(node, ast.expr) else []
    pairs = [(target, alone) for target in targets]
    found: list[tuple[str, ast.expr | None, ast.expr | None]] = []
    while pairs:
        target, alone = pairs.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pairs += zip(target.elts, _elements(alone, target), strict=True)
        elif isinstance(target, ast.Starred):
            pairs.append((target.value, None))
        elif isinstance(target, ast.Subscript):
            found.append((ast.unparse(target.value), target.slice, alone))
        elif isinstance(target, (ast.Name, ast.Attribute)):
            found.append((ast.unparse(target), None, alone))
    return found


def _elements(value: ast.expr | None, of: ast.Tuple | ast.List) -> Sequence[ast.expr | None]:
    """What each of some targets gets of a value; None where that is not written out."""
    parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    starred = any(isinstance(part, ast.Starred) for part in (*parts, *of.elts))
    return parts if len(parts) == len(of.elts) and not starred else [None] * len(of.elts)


def names(node: ast.expr) -> Iterator[ast.expr]:
    """The variables and dotted names that an expression reads, but for what it calls."""
    if isinstance(node, ast.Call):
        if called_name(node) in NO_RESULT:
            return
        if isinstance(node.func, ast.Attribute):
            yield from names(node.func.value)  # `loss.item()`, `meter.compute()`
        if owner_of(node) not in ("", "self", "cls"):
            yield node
        for value in given(node):
            yield from names(value)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield node if dotted(node.value) else node.value
    elif isinstance(node, ast.Attribute) and dotted(node):
        yield node
        yield from names(node.value)
    elif isinstance(node, ast.Name):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                yield from names(child.iter)
            elif isinstance(child, ast.expr):
                yield from names(child)


def _is_declared(function: ast.AST | None, name: str) -> bool:
    """Whether a function says `global name` or `nonlocal name`."""
    nodes = own_of(function, ast.Global, ast.Nonlocal) if function is not None else ()
    return any(name in getattr(node, "names", ()) for node in nodes)


def _encloses(stack: Stack, depth: int, inner: int) -> bool:
    """Whether the variables of one function are known in another one: it is around it, or is the
    file itself."""
    outer, function, source = stack.functions[depth], stack.functions[inner], stack.source(inner)
    if source is None or stack.source(depth) is not source:
        return False
    return outer is not None and _is_inside(source, function, outer)


def _is_inside(source: Source, function: ast.AST | None, outer: ast.AST | None) -> bool:
    """Whether a function is defined in another one, or is that one."""
    while function is not None and function is not outer:
        function = source.parents.get(function)
    return function is not None
