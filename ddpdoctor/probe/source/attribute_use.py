"""Does what a module's `forward` returns depend on the value that a buffer had before?

The source of `forward` and of the methods that it calls is read: a buffer is used where it is
combined with what the module is given, and the result is returned. A buffer that is written anew
before it is read, or that is returned by itself (for a log), is not.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from .ast_cache import dotted, function_of, last_name

BUFFER, INPUT, BOTH = 1, 2, 4
"""What a value depends on; `BOTH` where the two were combined."""

Place = tuple[CodeType, int]

_SHAPES = ("shape", "size", "numel", "dim", "ndim", "device", "dtype", "new_zeros", "new_ones")
_NORMS = ("batch_norm", "instance_norm")
"""Functions that use the running statistics that they are given in evaluation only."""
_ANEW = ("copy_", "normal_", "uniform_", "bernoulli_", "fill_", "zero_")
"""Methods that overwrite all of a tensor."""
_DEEP = 6
"""How many calls of methods are followed."""


def used(kind: type, buffer: str, buffers: set[str]) -> Place | None:
    """The line at which `forward` uses a buffer for what it returns; None if none was found.

    Args:
        buffers: names of all buffers of the module.
    """
    code = _method(kind, "forward")
    if code is None:
        return None
    reader = _Reader(kind, buffer, buffers)
    return reader.place if reader.returned(code, None, 0) & BOTH else None


def written(kind: type, buffer: str) -> tuple[Place, bool] | None:
    """The first line of the class that writes to a buffer, but for its constructor, and whether it
    goes on from the value that the buffer had; such a line is preferred."""
    places = list(_writing(kind, buffer))
    return next((p for p in places if p[1]), places[0] if places else None)


def _writing(kind: type, buffer: str) -> Iterator[tuple[Place, bool]]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            break
        for name, function in vars(base).items():
            code = None if name == "__init__" else _code(function)
            node = function_of(code) if code is not None else None
            for part in ast.walk(node) if node is not None else ():
                whole = f"{_own(node)}.{buffer}"
                if code is not None and isinstance(part, ast.stmt) and _writes(part, whole):
                    yield (code, part.lineno), _goes_on(part, whole)


def _goes_on(statement: ast.stmt, name: str) -> bool:
    """Whether a statement that writes to an attribute computes from its value."""
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        reads = any(dotted(part) == name for part in ast.walk(statement.value))
        parts = isinstance(statement, ast.Assign) and isinstance(
            statement.targets[0], ast.Subscript
        )
        return reads or parts or isinstance(statement, ast.AugAssign)
    attributes = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
    return not attributes & {*_ANEW}


def _writes(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(dotted(t.value if isinstance(t, ast.Subscript) else t) == name for t in targets)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    changed = _receiver(call)
    return changed == name if changed else any(dotted(a) == name for a in call.args[:1])


def _receiver(call: ast.expr) -> str:
    """What a chain of calls in place begins with: `self.x` in `self.x.data.mul_(2).add_(y)`."""
    node: ast.expr = call
    changes = False
    while True:
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute) and (node.attr.endswith("_") or node.attr == "data"):
            changes |= node.attr.endswith("_")
            node = node.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return dotted(node) if changes else ""


def _own(function: ast.AST | None) -> str:
    """The name of a method's first parameter."""
    arguments = getattr(function, "args", None)
    names = [*arguments.posonlyargs, *arguments.args] if arguments is not None else []
    return names[0].arg if names else ""


def _method(kind: type, name: str) -> CodeType | None:
    return _code(inspect.getattr_static(kind, name, None))


def _code(function: Any) -> CodeType | None:
    function = inspect.unwrap(getattr(function, "fget", None) or function)
    return function.__code__ if isinstance(function, FunctionType) else None


class _Reader:
    """Follows one buffer through the methods of a class.

    Attributes:
        place: where the buffer was first read in an expression with inputs.
        fresh: the buffer was written anew in this forward, whatever branches were taken.
        sure: the statement that is read now runs in every forward.
    """

    def __init__(self, kind: type, buffer: str, buffers: set[str]) -> None:
        self.kind = kind
        self.buffer = buffer
        self.buffers = buffers
        self.place: Place | None = None
        self.fresh = False
        self.sure = True
        self.running: list[CodeType] = []

    def returned(self, code: CodeType, given: list[int] | None, deep: int) -> int:
        """What the result of a method depends on.

        Args:
            given: what its arguments depend on, None for those of `forward`.
        """
        function = function_of(code)
        if deep > _DEEP or code in self.running or not isinstance(function, ast.FunctionDef):
            return 0
        self.running.append(code)
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
        every = [*names, *(a.arg for a in arguments.kwonlyargs)]
        every += [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
        known = dict.fromkeys(every, INPUT)
        if given is not None:
            known = dict(zip(names, given, strict=False))
        scope, sure = _Scope(self, code, _own(function), known, deep), self.sure
        scope.block(function.body)
        self.sure = sure
        self.running.pop()
        return scope.result


class _Scope:
    """One running method.

    Attributes:
        known: by name, what a variable (or an attribute, `self.x`) depends on.
        result: what is returned.
    """

    def __init__(self, reader: _Reader, code: CodeType, own: str, known: dict[str, int], deep: int):
        self.reader = reader
        self.code = code
        self.own = own
        self.known = known
        self.deep = deep
        self.result = 0

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._assigned(node)
        elif isinstance(node, ast.Expr):
            self._called(node.value)
        elif isinstance(node, ast.Return):
            self.result |= self.value(node.value)
        elif isinstance(node, ast.If):
            holds = self._in_training(node.test)
            blocks = [node.body] * (holds is not False) + [node.orelse] * (not holds)
            self._perhaps([s for block in blocks for s in block], sure=holds is not None)
        elif isinstance(node, (ast.For, ast.While)):
            for _ in range(2):
                if isinstance(node, ast.For):
                    self._set(node.target, self.value(node.iter))
                self._perhaps([*node.body, *node.orelse])
        elif isinstance(node, ast.With):
            self.block(node.body)
        elif isinstance(node, ast.Try):
            self._perhaps([*node.body, *node.orelse, *node.finalbody])

    def _perhaps(self, statements: list[ast.stmt], *, sure: bool = False) -> None:
        """Statements that may be left out; with a `return` in them, so may what follows."""
        before = self.reader.sure
        self.reader.sure &= sure
        self.block(statements)
        leaves = any(isinstance(n, ast.Return) for s in statements for n in ast.walk(s))
        self.reader.sure = before and (sure or not leaves)

    def _in_training(self, test: ast.expr) -> bool | None:
        """Whether a condition holds while the module is in training mode; None if unknown."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            holds = self._in_training(test.operand)
            return None if holds is None else not holds
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)
            parts = {self._in_training(part) for part in test.values}
            return decides if decides in parts else None if None in parts else not decides
        return True if dotted(test) == f"{self.own}.training" else None

    def _assigned(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        value = self.value(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if self._is_buffer(target.value if isinstance(target, ast.Subscript) else target):
                whole = not isinstance(target, ast.Subscript) or _everything(target.slice)
                if whole and not isinstance(node, ast.AugAssign):
                    self._anew(node.value)
            else:
                before = self.known.get(dotted(target), 0) if isinstance(node, ast.AugAssign) else 0
                self._set(target, value if not before else _combined([value, before]))

    def _set(self, target: ast.expr, value: int) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._set(part, value)
        elif isinstance(target, ast.Starred):
            self._set(target.value, value)
        else:
            name = dotted(target.value if isinstance(target, ast.Subscript) else target)
            if name and name.removeprefix(f"{self.own}.") not in self.reader.buffers:
                self.known[name] = self.known.get(name, 0) | value

    def _called(self, node: ast.expr) -> None:
        """A call whose result is not kept: it may write in place."""
        place, value, name = self.reader.place, self.value(node), _receiver(node)
        if not name or name.removeprefix(f"{self.own}.") in self.reader.buffers:
            self.reader.place = place  # an update is no use
        if name == f"{self.own}.{self.reader.buffer}":
            if isinstance(node, ast.Call) and _overwrites(node.func):
                self._anew(*node.args)
        elif name:
            self.known[name] = self.known.get(name, 0) | value

    def _anew(self, *values: ast.expr | None) -> None:
        """The buffer is overwritten with values; if none is from buffers, it is read no more."""
        names = {dotted(part) for v in values if v is not None for part in ast.walk(v)}
        mine = {f"{self.own}.{name}" for name in self.reader.buffers}
        from_buffers = any(self.value(v) & (BUFFER | BOTH) for v in values)
        self.reader.fresh |= self.reader.sure and not (names & mine or from_buffers)

    def _is_buffer(self, node: ast.AST) -> bool:
        return dotted(node) == f"{self.own}.{self.reader.buffer}"

    def value(self, node: ast.AST | None) -> int:
        """What an expression depends on."""
        if node is None or isinstance(node, (ast.Constant, ast.Lambda)):
            return 0
        if isinstance(node, ast.Attribute) and node.attr in _SHAPES:
            return 0
        if self._is_buffer(node):
            return 0 if self.reader.fresh else BUFFER
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := dotted(node)) in self.known:
            return self.known[name]
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            found = inspect.getattr_static(self.reader.kind, node.attr, None)
            if owner == self.own and isinstance(found, property) and (code := _code(found)):
                return self.reader.returned(code, [], self.deep + 1)
            return self.value(node.value)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.IfExp):
            holds = self._in_training(node.test)
            arms = [node.body] * (holds is not False) + [node.orelse] * (not holds)
            return _any([self.value(arm) for arm in arms])
        parts = [self.value(child) for child in ast.iter_child_nodes(node)]
        if isinstance(node, (ast.BinOp, ast.Subscript, ast.Compare)):
            return self._noted(node, _combined(parts))
        return _any(parts)

    def _call(self, node: ast.Call) -> int:
        given = [self.value(a) for a in (*node.args, *(k.value for k in node.keywords))]
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _SHAPES:
            return 0
        if last_name(function) in _NORMS:
            return _any(given) & INPUT
        if isinstance(function, ast.Attribute) and dotted(function.value) == self.own:
            code = _method(self.reader.kind, function.attr)
            if code is not None:
                inside = self.reader.returned(code, given[: len(node.args)], self.deep + 1)
                if inside or function_of(code) is not None:
                    return inside
        owner = self.value(function.value) if isinstance(function, ast.Attribute) else 0
        return self._noted(node, _combined([owner, *given]))

    def _noted(self, node: ast.expr, value: int) -> int:
        if value & BOTH and self.reader.place is None:
            self.reader.place = self.code, node.lineno
        return value


def _any(parts: list[int]) -> int:
    value = 0
    for part in parts:
        value |= part
    return value


def _combined(parts: list[int]) -> int:
    value = _any(parts)
    return value | BOTH if value & BUFFER and value & INPUT else value


def _everything(index: ast.expr) -> bool:
    """Whether an index is `[:]` or `[...]`."""
    whole = isinstance(index, ast.Slice) and not (index.lower or index.upper or index.step)
    return whole or (isinstance(index, ast.Constant) and index.value is ...)


def _overwrites(method: ast.expr) -> bool:
    """Whether a method overwrites all of an attribute: it is called on that itself, not on the
    result of another call."""
    if not isinstance(method, ast.Attribute) or method.attr not in _ANEW:
        return False
    return not any(isinstance(part, (ast.Call, ast.Subscript)) for part in ast.walk(method.value))
