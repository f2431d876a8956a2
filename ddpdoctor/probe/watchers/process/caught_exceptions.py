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

import msgspec

from ....events import ExceptionPassed
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording import hooks
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...training import lifecycle
from ...training.records import Backward, Forward, Loading
from .worker_exceptions import relayed

EMITTED_AT_MOST = 50
MESSAGE_LIMIT = 300


class CaughtExceptions(Watcher):
    lost = "exceptions that the program catches"

    def __init__(self) -> None:
        self.emitted = 0
        self.logged: ExceptionPassed | None = None
        # Identity of the exception that was being handled when the last collective was called.
        self.unwinding = 0

    def install(self) -> None:
        self.emitted, self.logged, self.unwinding = 0, None, 0
        self.around(logging.Logger, "handle", before=self._message_written)
        for name in ("print_exception", "format_exception"):  # `print_exc` and the like call these
            self.around(traceback, name, before=self._message_written)

    @on(lifecycle.forward_failed)
    def _forward_failed(self, recorder: Recorder, forward: Forward) -> None:
        assert forward.error is not None
        self.record(recorder, "forward", forward.error, forward.site)

    @on(lifecycle.backward_failed)
    def _backward_failed(self, recorder: Recorder, backward: Backward) -> None:
        assert backward.error is not None
        self.record(recorder, "backward", backward.error, backward.site)

    @on(lifecycle.loading_failed)
    def _loading_failed(self, recorder: Recorder, loading: Loading) -> None:
        assert loading.error is not None
        self.record(recorder, "data", loading.error, loading.site)

    def _message_written(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        """A message is logged or a traceback printed: record the exception being handled, if
        any."""
        error = sys.exc_info()[1]
        if error is not None and self._record_handled(recorder, "handler", error):
            hooks.handled.fire(recorder, error)

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        """A collective is called: record the exception being handled, if any. In a handler or a
        `finally` this rank may be the only one to call it."""
        error = sys.exc_info()[1]
        # Only its id is kept: the exception would keep alive all variables of its frames.
        last, self.unwinding = self.unwinding, id(error)
        if error is not None and id(error) != last:
            self._record_handled(recorder, "unwinding", error)

    def _record_handled(self, recorder: Recorder, where: str, error: BaseException) -> bool:
        """Record an exception that the user's own code has caught; returns whether it was that. The
        end of an iterator is none."""
        trace = error.__traceback__
        if trace is None or isinstance(error, StopIteration):
            return False
        if recorder.sites.kind(trace.tb_frame.f_code) != "user":
            return False
        tried = recorder.sites.number(trace.tb_frame.f_code, trace.tb_lineno)
        self.record(recorder, where, error, tried, tried)
        return True

    def record(
        self, recorder: Recorder, where: str, error: BaseException, site: int, tried: int = -1
    ) -> None:
        """Record an exception.

        Args:
            where: what it came out of, as in `ExceptionPassed`.
            site: line to record if the traceback holds no line of the user.
            tried: line of the `try` that caught it, -1 if unknown.
        """
        if self.emitted >= EMITTED_AT_MOST or not isinstance(error, Exception):
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
            last, self.logged = self.logged, event
            if last is not None and msgspec.structs.replace(event, at=last.at) == last:
                return  # the same exception: a handler may write several messages
        self.emitted += 1
        recorder.emit(event)


def raised_at(recorder: Recorder, trace: TracebackType | None, site: int) -> int:
    """Site of the innermost line of the user in a traceback, else `site`."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if recorder.sites.kind(code) == "user":
            site = recorder.sites.number(code, trace.tb_lineno)
        trace = trace.tb_next
    return site
