"""Which functions of the program a function calls, directly or not, as the names in its code say.
Nothing of the user's is executed."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import reduce
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from ..recording.code_locations import classify
from ..recording.frames import variables
from .ast_cache import calls_on
from .call_resolver import Bound, Scope, attribute

MOST = 200
"""Functions that are followed, at most: bounds the time in a step."""


def forwards(modules: Iterable[Any]) -> list[tuple[FunctionType, type]]:
    """The `forward` functions of modules, each with its class."""
    found = {type(m): getattr(type(m), "forward", None) for m in modules}
    return [(made, owner) for owner, made in found.items() if isinstance(made, FunctionType)]


def called_by(begun: Iterable[tuple[FunctionType, type]]) -> set[CodeType]:
    """The code of all functions of the program that these call, directly or not; without those
    given."""
    ahead = list(begun)
    seen = {function.__code__ for function, _ in ahead}
    first = set(seen)
    for function, owner in ahead:
        for found in _named(function, owner) if is_users(function) else ():
            if found.__code__ not in seen and is_users(found) and len(ahead) < MOST:
                seen.add(found.__code__)
                ahead.append((found, owner))
    return seen - first


_CALLED = re.compile(r"\b([A-Za-z_]\w*(?:\.\w+)*)\(")


def called_in(frame: FrameType, text: str) -> set[CodeType]:
    """The code of all functions of the program that some lines (`text`) of a running function call,
    directly or not."""
    scope = Scope(variables(frame), frame.f_globals)
    found = (_resolved(path, scope) for path in set(_CALLED.findall(text)))
    begun = [it for it in found if it is not None and is_users(it[0])]
    return {function.__code__ for function, _ in begun} | called_by(begun)


def _resolved(path: str, scope: Scope) -> tuple[FunctionType, type] | None:
    """The function that a dotted name stands for, with the class it is a method of; for a module,
    its forward. None if it is something else."""
    first, *rest = path.split(".")
    found = reduce(attribute, rest, scope.get(first))
    if isinstance(found, Bound):
        return found.function, type(found.owner)
    if isinstance(found, (staticmethod, classmethod, MethodType)):
        found = found.__func__
    if isinstance(found, FunctionType):
        return found, FunctionType
    forward = getattr(type(found), "forward", None)
    return (forward, type(found)) if isinstance(forward, FunctionType) else None


def methods_called(function: ast.AST, name: str, owner: Any) -> Iterator[tuple[ast.Call, Any]]:
    """The calls in a function of methods of an object, which has this name there, each with the
    method."""
    for call, called in calls_on(function, name):
        found = attribute(owner, called)
        if isinstance(found, Bound):
            yield call, found.function


def is_users(function: FunctionType) -> bool:
    return classify(function.__code__.co_filename) == "user"


def _named(function: FunctionType, owner: type) -> Iterator[FunctionType]:
    """The functions that the names in a function's code may mean: global functions, functions of
    imported modules, methods of its class."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    globals_ = function.__globals__
    spaces = [globals_[n] for n in names if isinstance(globals_.get(n), ModuleType)]
    for name in names:
        every = [globals_.get(name), *(vars(space).get(name) for space in spaces)]
        for value in (*every, inspect.getattr_static(owner, name, None)):
            plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(plain, FunctionType):
                yield plain


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
