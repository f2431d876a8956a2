"""Exceptions that come out of what is watched: what of them is on record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events import ExceptionPassed
from ddpdoctor.probe.bootstrap import activation
from ddpdoctor.probe.watchers.process import caught_exceptions, exits
from ddpdoctor.probe.watchers.process.caught_exceptions import CaughtExceptions

WORKER = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/torch/fetch.py", line 50, in fetch
    data = [self.dataset[idx]]
  File "/home/data.py", line 12, in __getitem__
    raise OSError("truncated")
OSError: truncated
"""


class Sites:
    """The user's files are this one and those at home; numbers are lines."""

    def kind(self, code: Any) -> str:
        return self.kind_of(code.co_filename)

    def kind_of(self, file: str) -> str:
        return "user" if file in (__file__, "/home/data.py") else "torch"

    def number(self, code: Any, line: int) -> int:
        return line

    def place(self, file: str, line: int, function: str) -> int:
        return line


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[ExceptionPassed]:
    monkeypatch.setattr(CaughtExceptions.current, "emitted", 0)
    return []


def passes(told: list[ExceptionPassed], error: BaseException, site: int = 3) -> None:
    recorder: Any = SimpleNamespace(emit=told.append, sites=Sites(), step=7)
    CaughtExceptions.current.record(recorder, "forward", error, site)


def test_the_line_that_raised(told: list[ExceptionPassed]) -> None:
    try:
        [].pop()
    except IndexError as error:
        passes(told, error)
        trace = error.__traceback__
    assert trace is not None
    assert (told[0].kind, told[0].site, told[0].step) == ("IndexError", trace.tb_lineno, 7)
    assert told[0].text == "IndexError: pop from empty list"


def test_where_no_line_is_known_the_call_is_told(told: list[ExceptionPassed]) -> None:
    passes(told, ValueError())
    assert (told[0].site, told[0].text) == (3, "ValueError")


def test_an_exception_of_a_worker(told: list[ExceptionPassed]) -> None:
    passes(told, OSError(WORKER))
    assert (told[0].text, told[0].site) == ("OSError: truncated", 12)


def test_what_ends_a_program_is_not_told_and_not_all_is(told: list[ExceptionPassed]) -> None:
    passes(told, KeyboardInterrupt())
    assert not told
    for _ in range(2 * caught_exceptions.EMITTED_AT_MOST):
        passes(told, ValueError())
    assert len(told) == caught_exceptions.EMITTED_AT_MOST


def test_what_a_handler_logs_was_caught(
    told: list[ExceptionPassed], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder: Any = SimpleNamespace(emit=told.append, sites=Sites(), step=7)
    monkeypatch.setattr(CaughtExceptions.current, "logged", None)
    CaughtExceptions.current._message_written(recorder, (), {})
    try:
        next(iter(()))
    except StopIteration:  # the end of an iterator is no failure
        CaughtExceptions.current._message_written(recorder, (), {})
    assert not told
    try:
        int("x")
    except ValueError as error:
        for _ in range(2):
            CaughtExceptions.current._message_written(recorder, (), {})
        assert error.__traceback__ is not None
        line = error.__traceback__.tb_lineno
    (event,) = told
    assert (event.where, event.kind, event.tried) == ("handler", "ValueError", line)


def test_what_is_being_handled_as_a_collective_is_called(
    told: list[ExceptionPassed], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder: Any = SimpleNamespace(emit=told.append, sites=Sites(), step=7)
    call: Any = None
    monkeypatch.setattr(CaughtExceptions.current, "unwinding", 0)
    line = test_what_is_being_handled_as_a_collective_is_called.__code__.co_firstlineno + 9
    with pytest.raises(ValueError):
        try:
            int("x")
        finally:
            CaughtExceptions.current._called(recorder, call)
            CaughtExceptions.current._called(recorder, call)
    assert [(e.where, e.kind, e.tried) for e in told] == [("unwinding", "ValueError", line)]
    CaughtExceptions.current._called(recorder, call)
    assert len(told) == 1, "nothing is handled here"


def test_a_block_that_is_left_by_an_exit_ends_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder: Any = SimpleNamespace(sites=Sites())
    monkeypatch.setattr(exits, "_ending", type(exits._ending)())
    monkeypatch.setattr(exits, "guarded", lambda part, hook, lost="": hook(recorder))
    monkeypatch.setattr(exits, "leave", lambda: None)
    monkeypatch.setattr(activation, "uninstall", lambda: None)
    try:
        raise SystemExit(0)
    except SystemExit as error:
        activation.leave(error, error.__traceback__)
        assert error.__traceback__ is not None
        line = error.__traceback__.tb_lineno
    ending = exits._ending
    assert (ending.how, ending.status, ending.site) == ("sys.exit", 0, line)
