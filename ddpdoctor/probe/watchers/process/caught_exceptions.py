"""Which exceptions does the program catch before it goes on?

Nothing else is seen of a caught exception. It is recorded when it leaves a forward, a backward or a
loader, when the user's handler logs or prints it, or when a collective is called while it is being
handled.
"""

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


class _Recorded:
    emitted = 0
    logged: ExceptionPassed | None = None
    unwinding = 0
    """Identity of the exception that was being handled when the last collective was called."""


_recorded = _Recorded()


def install() -> None:
    _recorded.emitted, _recorded.logged, _recorded.unwinding = 0, None, 0
    around(logging.Logger, "handle", before=_message_written, lost=LOST)
    for name in ("print_exception", "format_exception"):  # `print_exc` and the like call these
        around(traceback, name, before=_message_written, lost=LOST)
    call_hooks.called.subscribe(_called, lost=LOST)
    lifecycle.forward_failed.subscribe(_forward_failed, lost=LOST)
    lifecycle.backward_failed.subscribe(_backward_failed, lost=LOST)
    lifecycle.loading_failed.subscribe(_loading_failed, lost=LOST)


def _forward_failed(recorder: Recorder, forward: Forward) -> None:
    assert forward.error is not None
    record(recorder, "forward", forward.error, forward.site)


def _backward_failed(recorder: Recorder, backward: Backward) -> None:
    assert backward.error is not None
    record(recorder, "backward", backward.error, backward.site)


def _loading_failed(recorder: Recorder, loading: Loading) -> None:
    assert loading.error is not None
    record(recorder, "data", loading.error, loading.site)


def _message_written(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A message is logged or a traceback printed: record the exception being handled, if any."""
    error = sys.exc_info()[1]
    if error is not None and _record_handled(recorder, "handler", error):
        hooks.handled.fire(recorder, error)


def _called(recorder: Recorder, call: Call) -> None:
    """A collective is called: record the exception being handled, if any. In a handler or a
    `finally` this rank may be the only one to call it."""
    error = sys.exc_info()[1]
    # Only its id is kept: the exception would keep alive all variables of its frames.
    last, _recorded.unwinding = _recorded.unwinding, id(error)
    if error is not None and id(error) != last:
        _record_handled(recorder, "unwinding", error)


def _record_handled(recorder: Recorder, where: str, error: BaseException) -> bool:
    """Record an exception that the user's own code has caught; returns whether it was that."""
    trace = error.__traceback__
    if trace is None or recorder.sites.kind(trace.tb_frame.f_code) != "user":
        return False
    tried = recorder.sites.number(trace.tb_frame.f_code, trace.tb_lineno)
    record(recorder, where, error, tried, tried)
    return True


def record(
    recorder: Recorder, where: str, error: BaseException, site: int, tried: int = -1
) -> None:
    """Record an exception.

    Args:
        where: what it came out of, as in `ExceptionPassed`.
        site: line to record if the traceback holds no line of the user.
        tried: line of the `try` that caught it, -1 if unknown.
    """
    if _recorded.emitted >= EMITTED_AT_MOST or not isinstance(error, Exception):
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
        last, _recorded.logged = _recorded.logged, event
        if last is not None and msgspec.structs.replace(event, at=last.at) == last:
            return  # the same exception: a handler may write several messages
    _recorded.emitted += 1
    recorder.emit(event)


def raised_at(recorder: Recorder, trace: TracebackType | None, site: int) -> int:
    """Site of the innermost line of the user in a traceback, else `site`."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if recorder.sites.kind(code) == "user":
            site = recorder.sites.number(code, trace.tb_lineno)
        trace = trace.tb_next
    return site
