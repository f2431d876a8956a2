"""Which line of the program took the model out of its wrapper, as `model = model.module` does, or
passes the model on without it, as `losses(model.module, x)` does?

Nothing of the user's is executed: the running functions are searched for the statement that gave
the model the name it has now, and what that statement calls for the attribute of the wrapper; or
the arguments of the calls that they make.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from ..recording.frames import variables
from .ast_cache import called_name, covers_line, function_of, given, own_of, parts_of, source_of
from .call_resolver import Found, Scope, entered, first_argument, resolve, searched

ATTRIBUTE = "module"
"""Under which DDP keeps the model."""

DEPTH = 3
"""How many calls of the program's functions are followed."""

CALLS = 50
"""Calls of one function that are followed."""


class TakenOut(NamedTuple):
    """The statement that named the model, and the line of the program that reads the attribute of
    the wrapper for it: the same one, or in a function that it calls; None if a library reads it."""

    named: Found
    read: Found | None


def taken_out(
    frame: FrameType | None,
    is_user: Callable[[CodeType], bool],
    model: Any,
    made_at: Found | None = None,
) -> TakenOut | None:
    """The last statement before the line that is executing, in the innermost running function that
    has one.

    Args:
        made_at: the line that wraps the model; earlier ones of that function do not count.
    """
    for user, scope in searched(frame, lambda f: is_user(f.f_code)):
        node, line = function_of(user.f_code), user.f_lineno
        after = made_at.line if made_at is not None and made_at.code is user.f_code else 0
        named = [
            statement
            for statement in (own_of(node, ast.Assign) if node is not None else ())
            if after < statement.lineno
            if any(resolve(target, scope) is model for target in _targets(statement))
        ]
        named.sort(key=lambda s: (s.lineno <= line, s.lineno), reverse=True)
        for statement in named:
            reads = _reads(statement.value, user.f_code, scope, is_user, DEPTH)
            found = next(reads, None)
            if found is not None:
                here = Found(user.f_code, statement.lineno)
                return TakenOut(here, found if found.line else None)
    return None


class HandedOn(NamedTuple):
    """A line that passes the model on instead of its wrapper, and the argument as written."""

    found: Found
    argument: str


def handed_on(
    caller: FrameType, is_user: Callable[[CodeType], bool], model: Any, wrapper: Any
) -> HandedOn | None:
    """How a function that calls the model, and has no wrapper, came by it: the innermost call, of
    those that led there, with `wrapper.module` among its arguments; else the innermost with the
    model, in a function that has the wrapper as well. A function that has the wrapper itself came
    by it where `partial` was given the model."""
    chosen = _has(caller, variables(caller), wrapper)
    other = None
    for user, scope in searched(caller if chosen else caller.f_back, lambda f: is_user(f.f_code)):
        for argument in _prepared(user) if chosen else [*_arguments(user), *_prepared(user)]:
            if resolve(argument, scope) is not model:
                continue
            source = source_of(user.f_code.co_filename)
            text = source.written(argument) if source is not None else ""
            one = HandedOn(Found(user.f_code, argument.lineno), text)
            if isinstance(argument, ast.Attribute) and argument.attr == ATTRIBUTE:
                return one
            if other is None and _has(user, scope.names, wrapper):
                other = one
        if chosen:
            break
    return other


def _arguments(frame: FrameType) -> Iterator[ast.expr]:
    """The arguments of the calls on the line that a function executes."""
    for call in _running(frame):
        yield from given(call)


def _prepared(frame: FrameType) -> Iterator[ast.expr]:
    """The arguments that `partial` was given before for what is called on that line."""
    called = {call.func.id for call in _running(frame) if isinstance(call.func, ast.Name)}
    for node in parts_of(frame.f_code) if called else ():
        if isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call):
            names = {target.id for target in _targets(node) if isinstance(target, ast.Name)}
            if called & names and called_name(call) == "partial":
                yield from given(call)


def _running(frame: FrameType) -> Iterator[ast.Call]:
    """The calls on the line that a function executes."""
    for node in parts_of(frame.f_code):
        if isinstance(node, ast.Call) and covers_line(node, frame.f_lineno):
            yield node


def _has(frame: FrameType, names: Mapping[str, Any], wrapper: Any) -> bool:
    """Whether the wrapper is in a variable of a function, or in an attribute of its object."""
    stored = getattr(first_argument(frame), "__dict__", None)
    held = stored.values() if type(stored) is dict else ()
    return any(value is wrapper for value in (*names.values(), *held))


def _targets(statement: ast.Assign) -> Iterator[ast.expr]:
    """The names that an assignment gives, those in tuples too."""
    ahead = list(statement.targets)
    while ahead:
        target = ahead.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            ahead += target.elts
        else:
            yield target


def _reads(
    node: ast.AST, code: CodeType, scope: Scope, is_user: Callable[[CodeType], bool], depth: int
) -> Iterator[Found]:
    """The lines that read the attribute: in some code, then in the functions that it calls; 0 for a
    line of a library."""
    parts = list(ast.walk(node))
    for part in parts:
        names = isinstance(part, ast.Attribute) and part.attr == ATTRIBUTE
        if names or _asks_by_name(part):
            yield Found(code, part.lineno)  # type: ignore[attr-defined]
    calls = [p for p in parts if isinstance(p, ast.Call)] if depth else []
    for call in calls[:CALLS]:
        if (inner := entered(call, scope)) is None:
            continue
        function, arguments = inner
        if not is_user(function.__code__):
            if _of_a_library(function):
                yield Found(function.__code__, 0)
        elif (body := function_of(function.__code__)) is not None:
            yield from _reads(body, function.__code__, arguments, is_user, depth - 1)


def _of_a_library(function: FunctionType) -> bool:
    """Whether a function, or one that it calls, names the attribute. Its source is not parsed: such
    files are large."""
    known = (function.__globals__.get(name) for name in function.__code__.co_names)
    every = (function, *(f for f in known if isinstance(f, FunctionType)))
    return any(ATTRIBUTE in f.__code__.co_names or ATTRIBUTE in f.__code__.co_consts for f in every)


def _asks_by_name(node: ast.AST) -> bool:
    """Whether it is `getattr(model, "module", model)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and any(isinstance(a, ast.Constant) and a.value == ATTRIBUTE for a in node.args)
    )
