"""Whether a program polls for a file before it reads another one, as its source says.

A loop that asks whether a file exists and sleeps in between is how ranks wait for another without a
collective. The file must be another one than is then read: that exists as soon as a rank begins to
write it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

from ..recording.frames import variables
from .ast_cache import called_name, function_of, given, own_nodes, parts_of
from .dead_branches import never_runs

_ASKS = frozenset(
    ("exists", "isfile", "is_file", "isdir", "is_dir", "access", "stat", "getmtime", "getsize",
     "listdir", "scandir", "iterdir", "glob")
)  # fmt: skip
_RESTS = frozenset(("sleep", "wait"))


def polled_before(frame: FrameType, *, itself: bool = False) -> bool:
    """Whether the function of a frame polls, above its current line, for another file than the line
    reads; with `itself`, for any file."""
    waiting = {name: code for name, code in _callable(frame) if _ASKS & set(code.co_names)}
    own = _ASKS & set(frame.f_code.co_names)
    tree = function_of(frame.f_code) if own or waiting else None
    if tree is None:
        return False
    asked: set[str] = set()
    read: set[str] = set()
    for node in own_nodes(tree):
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
        if isinstance(node, ast.Call) and line <= frame.f_lineno <= end:
            read |= _argument_dumps(node)
        elif (
            end < frame.f_lineno
            and (polled := _waited_for(node, waiting))
            and not never_runs(frame.f_code, line, frame.f_globals.get)
        ):
            asked |= polled
    return bool(asked if itself else asked - read)


def _waited_for(node: ast.AST, waiting: Mapping[str, CodeType]) -> set[str]:
    """What a loop polls for; for a call of a function with such a loop, its arguments."""
    if isinstance(node, (ast.For, ast.While)):
        return _asked(node)
    code = waiting.get(called_name(node)) if isinstance(node, ast.Call) else None
    parts = parts_of(code) if code is not None else []
    loops = (n for n in parts if isinstance(n, (ast.For, ast.While)))
    return (
        _argument_dumps(node) if isinstance(node, ast.Call) and any(map(_asked, loops)) else set()
    )


def _callable(frame: FrameType) -> Iterator[tuple[str, CodeType]]:
    """The Python functions and methods that the code of a frame may call, by name."""
    owner = type(variables(frame).get("self"))
    for name in frame.f_code.co_names:
        found = frame.f_globals.get(name, getattr(owner, name, None))
        code = getattr(found, "__code__", None)
        if isinstance(code, CodeType):
            yield name, code


def _asked(loop: ast.For | ast.While) -> set[str]:
    """What a loop asks the file system for, if it sleeps in between; else empty."""
    calls = [n for n in ast.walk(loop) if isinstance(n, ast.Call)]
    if not any(called_name(call) in _RESTS for call in calls):
        return set()
    return {text for call in calls if called_name(call) in _ASKS for text in _argument_dumps(call)}


def _argument_dumps(call: ast.Call) -> set[str]:
    """The arguments of a call, as `ast.dump`; the object, for a method without arguments."""
    values = given(call)
    if not values and isinstance(call.func, ast.Attribute):
        values = [call.func.value]
    return {ast.dump(value) for value in values}
