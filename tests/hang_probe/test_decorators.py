"""Which decorator decides whether a function runs, by the source of the wrapper that called it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from ddpdoctor.events import Statement
from ddpdoctor.probe.source.decorators import decorated

RANK = 0


def only_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        if RANK == 0:
            return function(*args)
        return None

    return wrapper


def not_others(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        if RANK != 0:
            return None
        return function(*args)

    return wrapper


def always(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def call(function: Callable[..., Any]) -> Any:
    """It has nothing to do with the decorators."""
    return function() if RANK == 0 else None


def is_user(code: CodeType) -> bool:
    return code.co_name.startswith("save")


def found() -> tuple[Statement, ...]:
    return decorated(sys._getframe(1), is_user)


@only_first
def save() -> Any:
    return found()


@not_others
def save_late() -> Any:
    return found()


@always
@only_first
def save_twice() -> Any:
    return found()


@always
def save_always() -> Any:
    return found()


def save_plain() -> Any:
    return found()


@pytest.mark.parametrize("function", [save, save_late, save_twice])
def test_a_wrapper_that_calls_on_some_ranks(function: Callable[..., Any]) -> None:
    head, *outer = call(function)
    assert [o.text for o in outer] == ["@always"] * (function is save_twice)
    late = function is save_late
    assert head.text == ("@not_others" if late else "@only_first")
    assert (head.kind, head.test) == ("decorated", "RANK != 0" if late else "RANK == 0")
    assert not head.is_branch


@pytest.mark.parametrize("function", [save_always, save_plain])
def test_a_wrapper_that_always_calls(function: Callable[..., Any]) -> None:
    assert [head.test for head in call(function)] == ["always"] * (function is save_always)


def test_a_decorator_of_the_program_has_lines_of_its_own() -> None:
    assert decorated(sys._getframe(), lambda code: True) == ()
