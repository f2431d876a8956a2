"""Exceptions that come out of a forward, a backward or a loader, that a handler of the user's logs
or prints, or that are being handled as a collective is called: where a program catches one and goes
on, nothing else is seen of it."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from types import TracebackType
from typing import Any

import msgspec

from ....events import ExceptionPassed
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording import hooks
from ...recording.patching import around
from ...recording.recorder import Recorder
from ...training import lifecycle
from ...training.records import Backward, Forward, Loading
from .worker_exceptions import relayed

LOST = "exceptions that the program catches"

EMITTED_AT_MOST = 50
MESSAGE_LIMIT = 300


class _Passing:
    emitted = 0
    logged: ExceptionPassed | None = None
    unwinding = 0
    """The identity of what was being handled as the last collective was called."""


_passing = _Passing()


def install() -> None:
    _passing.emitted, _passing.logged, _passing.unwinding = 0, None, 0
    around(logging.Logger, "handle", before=_told, lost=LOST)
    for name in ("print_exception", "format_exception"):  # others call these
        around(traceback, name, before=_told, lost=LOST)
    call_hooks.called.subscribe(_called, lost=LOST)
    lifecycle.forward_failed.subscribe(_forward_failed, lost=LOST)
    lifecycle.backward_failed.subscribe(_backward_failed, lost=LOST)
    lifecycle.loading_failed.subscribe(_loading_failed, lost=LOST)


def _forward_failed(recorder: Recorder, forward: Forward) -> None:
    assert forward.error is not None
    passed(recorder, "forward", forward.error, forward.site)


def _backward_failed(recorder: Recorder, backward: Backward) -> None:
    assert backward.error is not None
    passed(recorder, "backward", backward.error, backward.site)


def _loading_failed(recorder: Recorder, loading: Loading) -> None:
    assert loading.error is not None
    passed(recorder, "data", loading.error, loading.site)


def _told(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Something is logged, or a traceback is printed: in a handler of the user's, as a rule, that
    an exception was caught."""
    error = sys.exc_info()[1]
    if error is not None and _handled(recorder, "handler", error):
        hooks.handled.fire(recorder, error)


def _called(recorder: Recorder, call: Call) -> None:
    """A collective is called; in a handler of the user's, or in a `finally`, it may be that only
    this rank comes there. The exception itself is not kept: it would keep what its frames hold."""
    error = sys.exc_info()[1]
    last, _passing.unwinding = _passing.unwinding, id(error)
    if error is not None and id(error) != last:
        _handled(recorder, "unwinding", error)


def _handled(recorder: Recorder, where: str, error: BaseException) -> bool:
    """Record what was raised, where it is the user's own code that has caught it."""
    trace = error.__traceback__
    if trace is None or recorder.sites.kind(trace.tb_frame.f_code) != "user":
        return False
    tried = recorder.sites.number(trace.tb_frame.f_code, trace.tb_lineno)
    passed(recorder, where, error, tried, tried)
    return True


def passed(
    recorder: Recorder, where: str, error: BaseException, site: int, tried: int = -1
) -> None:
    """Record an exception; `site` is told where no line of the user's raised it or called what
    did."""
    if _passing.emitted >= EMITTED_AT_MOST or not isinstance(error, Exception):
        return
    text = str(error)
    other = relayed(text, recorder.sites, MESSAGE_LIMIT)
    if other is not None:
        frame = next((f for f in reversed(other.frames) if f.user), None)
        if frame is not None:
            site = recorder.sites.place(frame.file, frame.line, frame.function)
    else:
        site = raised_at(recorder, error.__traceback__, site)
    event = ExceptionPassed(
        at=time.monotonic(),
        where=where,
        kind=other.kind if other else type(error).__qualname__,
        message=(other.message if other else text)[:MESSAGE_LIMIT],
        step=recorder.step,
        site=site,
        tried=tried,
    )
    if tried >= 0:
        last, _passing.logged = _passing.logged, event
        if last is not None and msgspec.structs.replace(event, at=last.at) == last:
            return  # a handler may log in several lines
    _passing.emitted += 1
    recorder.emit(event)


def raised_at(recorder: Recorder, trace: TracebackType | None, site: int) -> int:
    """The innermost line of the user's, `site` where there is none."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if recorder.sites.kind(code) == "user":
            site = recorder.sites.number(code, trace.tb_lineno)
        trace = trace.tb_next
    return site
