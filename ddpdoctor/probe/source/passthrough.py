"""What a function passes on: only its own arguments to a collective, so that a difference between
ranks comes from its caller; or the result of a collective, to a caller that drops it,
or to a loss."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection
from types import CodeType, FrameType
from typing import NamedTuple

from .ast_cache import (
    covers_line,
    function_of,
    given,
    is_call_of,
    last_name,
    own_nodes,
    parts_of,
    results_of,
    source_of,
    spans,
)
from .dependence import INTO, Expression, Line, Search, Stack

LINES_LIMIT = 100
"""Lines from the head of a function to the call: longer functions are no mere helpers."""
_CHOICES = (ast.IfExp, ast.BoolOp, ast.Compare)
ASYNC = "async_op"
_NOT_SENT = ("group", ASYNC)
"""Arguments of collectives that do not say what is sent."""
_OF_MANY = ("len", "sum", "min", "max", "any", "all")
"""These reduce an argument to one value, which is no longer the argument."""
_SELECTS = ("masked_select", "nonzero", "argwhere", "unique", "unique_consecutive")
"""These choose elements by their values: how many there are is decided there, as in an index that
is computed (`x[mask.bool()]`)."""
_COPIES = ("tensor", "clone", "stack", "cat")
"""Calls whose result is no other tensor's memory."""
RETURNING = (
    "all_gather", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce", "all_to_all",
    "gather", "gather_for_metrics", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip
"""Functions, of any library, that return what they gather or reduce."""
_LISTS_RANKS = "new_group"
"""The argument of `new_group` must be the ranks themselves: one that computes them decides."""


def passes_through(code: CodeType, line: int, called: CodeType | None) -> bool:
    """Whether the call on a line passes values made only of the arguments of its function, and of
    nothing else that may differ between ranks.

    Args:
        called: the user's function that is called on that line; None for a function of
            `torch.distributed`.
    """
    parts = _definition(code, line) if _parameters(code) else []
    call = _call(parts, line, called)
    if call is None:
        return False
    values = _Values(parts, line, code)
    varying = [p for p in given(call, but=_NOT_SENT) if not _is_constant(p)]
    if not varying or not all(values.is_of_arguments(p) for p in varying):
        return False
    return not (called is None and last_name(call.func) == _LISTS_RANKS and values.computed)


def _parameters(code: CodeType) -> set[str]:
    """The names of a function's parameters, but `self` and `cls`."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return {*code.co_varnames[:count]} - {"self", "cls"}


def _arguments(node: ast.AST, code: CodeType) -> set[str]:
    """The names of a function's parameters, without a method's object, whatever its name: what is
    stored in that did not come with this call."""
    names = _parameters(code)
    source = source_of(code.co_filename)
    in_class = source is not None and isinstance(source.parents.get(node), ast.ClassDef)
    static = any(last_name(d) == "staticmethod" for d in getattr(node, "decorator_list", ()))
    if code.co_argcount and in_class and not static:
        names.discard(code.co_varnames[0])
    return names


def _definition(code: CodeType, line: int) -> list[ast.AST]:
    """The nodes of the function, itself first; empty if the call is too far below its head."""
    if not 0 <= line - code.co_firstlineno <= LINES_LIMIT:
        return []
    parts = parts_of(code)
    return parts if parts and isinstance(parts[0], ast.FunctionDef) else []


def _call(parts: list[ast.AST], line: int, called: CodeType | None) -> ast.Call | None:
    """The call of `called` (or of a function of torch) on that line, or the only call there."""
    calls = [n for n in parts if isinstance(n, ast.Call) and covers_line(n, line)]
    named = (call for call in calls if is_call_of(call, called))
    return next(named, calls[0] if len(calls) == 1 else None)


def _is_constant(node: ast.expr) -> bool:
    """Whether an expression is a constant: `1.0`, `SUM`, `dist.ReduceOp.SUM`."""
    return isinstance(node, ast.Constant) or last_name(node).isupper()


def _selects(node: ast.AST) -> bool:
    """Whether an expression chooses elements by values that it computes."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in _SELECTS
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Call)


class Call:
    """What the call on the innermost line of a stack gives."""

    def __init__(self, stack: Stack) -> None:
        self.function, (_, self.line) = stack.functions[0], stack.lines[0]

    def assigned(self, of: Expression, node: ast.AST) -> bool:
        return False

    def within(self, of: Expression) -> bool:
        """Whether an expression contains the call."""
        if of.function is not self.function:
            return False
        calls = (n for n in ast.walk(of.node) if isinstance(n, ast.Call))
        return any(spans(call, self.line) for call in calls)


def in_loss(calling: list[Line], backward: Line | None, entered: Collection[CodeType]) -> bool:
    """Whether a loss is computed from what a call gave.

    Args:
        calling: the stack of the call.
        backward: the line of the program's that calls `backward`.
        entered: functions of the program's that a library calls, and whose results it takes for
            losses where the program itself does not call `backward`.
    """
    stack = Stack(calling)
    search = Search(stack, Call(stack))
    losses: list[Expression] = []
    for depth, (code, _) in enumerate(calling):
        nodes = own_nodes(f) if (f := stack.functions[depth]) is not None else []
        if backward is not None and backward[0] is code:
            calls = (n for n in nodes if isinstance(n, ast.Call) and spans(n, backward[1]))
            for call in calls:
                owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
                losses += [Expression(stack, depth, e) for e in (*owner, *given(call))]
    if not losses:
        for depth, (code, _) in enumerate(calling):
            function = stack.functions[depth]
            if code in entered and function is not None:
                losses += [Expression(stack, depth, e) for e in results_of(function)]
    return any(search.reach(loss, loss.node) is not None for loss in losses)


class _Values:
    """What the variables of a function were assigned, up to a line.

    Attributes:
        computed: an expression that was asked about contains a binary operator.
    """

    def __init__(self, parts: list[ast.AST], line: int, code: CodeType) -> None:
        self._arguments = _arguments(parts[0], code)
        self._variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self._assigned: dict[str, list[ast.expr | None]] = {}
        self._asked: set[str] = set()
        self.computed = False
        values: dict[ast.expr, ast.expr] = {}
        for n in parts:
            if isinstance(n, ast.Assign):
                values |= dict.fromkeys(n.targets, n.value)
            elif isinstance(n, ast.AnnAssign) and n.value is not None:
                values[n.target] = n.value
            elif isinstance(n, ast.AugAssign):  # `x += 1`: still made of x
                values[n.target] = n.target
        for n in parts:
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.lineno <= line:
                self._assigned.setdefault(n.id, []).append(values.get(n))

    def is_of_arguments(self, value: ast.expr | None) -> bool:
        """Whether a value is made of arguments only. After False the object must not be used
        again: the names that were asked about count as answered."""
        if value is None:  # assigned by a loop, or unpacked
            return False
        parts = list(ast.walk(value))
        names = {n.id for n in parts if isinstance(n, ast.Name)}
        own = names & (self._variables | self._assigned.keys())
        self.computed |= any(isinstance(n, ast.BinOp) for n in parts)
        chosen = any(isinstance(n, _CHOICES) for n in parts)
        called = (n.func for n in parts if isinstance(n, ast.Call))
        one_of_many = any(isinstance(f, ast.Name) and f.id in _OF_MANY for f in called)
        if any(map(_selects, parts)):
            return False
        if not own or chosen or one_of_many or any("rank" in last_name(n) for n in parts[1:]):
            return False
        new, self._asked = own - self._asked, self._asked | own
        return all(map(self._is_argument, new))

    def _is_argument(self, name: str) -> bool:
        assigned = self._assigned.get(name)
        return (
            name in self._arguments
            if assigned is None
            else all(map(self.is_of_arguments, assigned))
        )


class Dropped(NamedTuple):
    """What a collective gives, where nobody has it.

    Attributes:
        name: of the variable that it is written to, or of the function that returns it.
        code, line: where the value is dropped: the call whose return value is not used, or the
            collective itself.
        copy: it is a reduced copy of something.
    """

    name: str
    code: CodeType
    line: int
    copy: bool = False


def dropped(frame: FrameType) -> Dropped | None:
    """Where the result of the collective of `torch.distributed` that a frame is about to call is
    dropped, if the function uses what it is written to, a copy or a list of its own, for nothing
    else, or returns it to callers that drop it; a copy may be made in the call itself."""
    code = frame.f_code
    nodes, calls = _calls(frame)
    written = [
        (n.args[0], last_name(n.func)) for n in calls if last_name(n.func) in INTO and n.args
    ]
    if len(written) != 1:
        return None
    result, op = written[0]
    reduces = op == "all_reduce"
    if reduces and _is_copy(result):
        return Dropped(ast.unparse(result), code, frame.f_lineno, copy=True)
    if not isinstance(result, ast.Name) or not _is_own(code, name := result.id):
        return None
    made = [
        n.value
        for n in nodes
        if isinstance(n, ast.Assign) and any(_is(target, name) for target in n.targets)
    ]
    if not made or not all(map(_is_copy if reduces else _is_new, made)):
        return None
    found = _unused(frame, nodes, name, result)
    return found and found._replace(copy=reduces)


def _is_own(code: CodeType, name: str) -> bool:
    """Whether a name is a variable of a function, or of a file's own code, and no parameter."""
    return name in (code.co_names if code.co_name == "<module>" else code.co_varnames) and (
        name not in _parameters(code)
    )


def returned_and_dropped(frame: FrameType) -> Dropped | None:
    """The same for a function of a library that returns what it gathers or reduces."""
    nodes, calls = _calls(frame)
    named = [n for n in calls if last_name(n.func) in RETURNING]
    return _dropped_value(frame, nodes, named[0]) if len(named) == 1 else None


def handle_dropped(frame: FrameType) -> Dropped | None:
    """The same for the handle that an asynchronous collective returns, without which nobody can
    wait for it."""
    nodes, calls = _calls(frame)
    named = [n for n in calls if any(k.arg == ASYNC for k in n.keywords)]
    return _dropped_value(frame, nodes, named[0]) if len(named) == 1 else None


def _dropped_value(frame: FrameType, nodes: list[ast.AST], call: ast.Call) -> Dropped | None:
    """Where the value of a call of a frame is dropped."""
    for node in nodes:
        if isinstance(node, ast.Expr) and node.value is call:
            return Dropped(last_name(call.func), frame.f_code, frame.f_lineno)
        if isinstance(node, ast.Assign) and node.value is call and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and _is_own(frame.f_code, target.id):
                return _unused(frame, nodes, target.id, None)
    if any(isinstance(n, ast.Return) and n.value is call for n in nodes):
        return _dropped_by_caller(last_name(call.func), frame)
    return None


def _calls(frame: FrameType) -> tuple[list[ast.AST], list[ast.Call]]:
    """The nodes of the function of a frame, and the calls on its line."""
    function = function_of(frame.f_code)
    nodes = own_nodes(function) if isinstance(function, (ast.FunctionDef, ast.Module)) else []
    return nodes, [n for n in nodes if isinstance(n, ast.Call) and covers_line(n, frame.f_lineno)]


def _unused(
    frame: FrameType, nodes: list[ast.AST], name: str, but: ast.AST | None
) -> Dropped | None:
    """Where a variable of a function is dropped, which is read nowhere but at one node."""
    used = [
        n
        for n in nodes
        if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        if n is not but
    ]
    inner = (n for n in parts_of(frame.f_code) if isinstance(n, ast.Name) and n.id == name)
    returned = [n.value for n in nodes if isinstance(n, ast.Return)]
    if any(n not in returned for n in used) or any(n not in nodes for n in inner):
        return None
    if not used:
        return Dropped(name, frame.f_code, frame.f_lineno)
    return _dropped_by_caller(name, frame)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_copy(value: ast.expr) -> bool:
    """Whether an expression makes a tensor of its own, from values that are not all constants."""
    if isinstance(value, ast.BinOp):
        return True
    if not isinstance(value, ast.Call) or last_name(value.func) not in _COPIES:
        return False
    of = value.args[0] if value.args else None
    method = last_name(value.func) == "clone" and isinstance(value.func, ast.Attribute)
    return method or (of is not None and any(isinstance(n, ast.Name) for n in ast.walk(of)))


def _is_new(value: ast.expr) -> bool:
    """Whether an expression makes a list, or an empty tensor, to be written to."""
    if isinstance(value, ast.BinOp):  # `[None] * n`
        return any(isinstance(side, ast.List) for side in (value.left, value.right))
    if isinstance(value, ast.Call):
        return last_name(value.func).startswith(("empty", "zeros", "ones", "new_"))
    if isinstance(value, ast.ListComp):
        return _is_new(value.elt)
    if isinstance(value, ast.List):
        return all(map(_is_new, value.elts))
    return isinstance(value, ast.Constant)


def _dropped_by_caller(name: str, frame: FrameType) -> Dropped | None:
    """The line of the nearest caller that drops what a frame returns; None where one uses it."""
    callee, caller = frame.f_code, frame.f_back
    while caller is not None:
        function = function_of(caller.f_code)
        found = [
            n
            for n in (own_nodes(function) if function is not None else ())
            if isinstance(n, (ast.Expr, ast.Return))
            and isinstance(n.value, ast.Call)
            and last_name(n.value.func) == callee.co_name
            and covers_line(n, caller.f_lineno)
        ]
        if len(found) != 1:
            return None
        if isinstance(found[0], ast.Expr):
            return Dropped(name, caller.f_code, caller.f_lineno)
        callee, caller = caller.f_code, caller.f_back
    return None
