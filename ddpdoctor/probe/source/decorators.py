"""Which decorator decides whether a function of the program runs, as `@rank_zero_only` does?

A wrapper in a library calls the function under a condition; none of its lines is the program's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from ...events import Statement
from ..recording.frames import variables
from .ast_cache import function_of
from .statements import enclosing

DECIDING = ("if", "elif", "else", "past")
"""Kinds of the statements around a call that decide whether it is made."""

MOST = 4
"""Decorators of one function that are looked at."""


def decorated(frame: FrameType, is_user: Callable[[CodeType], bool]) -> tuple[Statement, ...]:
    """For a running function of the program, the statements of its decorators' wrappers under which
    these called it, the innermost first: each with the decorator's line and text, and the condition
    in `test`. Empty where no library's wrapper called it."""
    node = function_of(frame.f_code)
    decorators = list(getattr(node, "decorator_list", ()))
    found: list[Statement] = []
    caller = frame.f_back
    while decorators and caller is not None and len(found) < MOST:
        decorator = decorators.pop()
        if is_user(caller.f_code) or not _wraps(caller, frame.f_code):
            break
        found += _deciding(caller, decorator)
        frame, caller = caller, caller.f_back
    return tuple(found)


def _wraps(caller: FrameType, called: CodeType) -> bool:
    """Whether a running function was made around the one that it calls."""
    known = variables(caller)
    made = (known.get(name) for name in caller.f_code.co_freevars)
    return any(getattr(function, "__code__", None) is called for function in made)


def _deciding(caller: FrameType, decorator: ast.expr) -> Iterator[Statement]:
    text = f"@{ast.unparse(decorator)}"
    around = enclosing(caller.f_code.co_filename, caller.f_lineno)
    heads = [(head.test, head.text) for head in around if head.kind in DECIDING and head.test]
    # A wrapper without a condition may ask for another function on some ranks, as its name says:
    # `@accelerator.on_main_process`.
    for test, of in heads or [(text.removeprefix("@"), "")]:
        yield Statement(line=decorator.lineno, text=text, kind="decorated", test=test, of=of)
