"""Finds the user's lines that change a number (a digest, say), by a trace function that computes it
after each line, for a short while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ..recording.frames import out_of_reach, variables
from ..recording.recorder import Recorder

LOST = "the line that edits a tensor"

LINES_AT_MOST = 3000
"""Lines that are traced, at most: a loop over data may run for ever."""
FOUND_AT_MOST = 8
MORE_S = 0.05
"""Seconds to search for more lines once one is found."""


class Tracer:
    """Traces the lines of the user's code in this thread, unless a debugger does.

    Args:
        kind: what is traced, for the caller.
        number: returns the number that is watched.
    """

    def __init__(self, recorder: Recorder, kind: str, number: Callable[[], int]) -> None:
        self.kind = kind
        self._recorder = recorder
        self._number = number
        self._value = number()
        self._line: tuple[CodeType, int] | None = None
        self._found: dict[tuple[CodeType, int], None] = {}
        self._spent = 0.0
        self._frames: list[FrameType] = []
        self._lines = 0

    @classmethod
    def start(cls, recorder: Recorder, kind: str, number: Callable[[], int]) -> Tracer | None:
        """Start tracing; None if another trace function (a debugger, coverage) is set, or no frame
        of the user's can be traced."""
        if sys.gettrace() is not None:
            return None
        tracer = cls(recorder, kind, number)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if tracer._follows(frame.f_code) and frame.f_trace is None:
                frame.f_trace = tracer._local
                tracer._frames.append(frame)
                if tracer._line is None:
                    tracer._line = (frame.f_code, frame.f_lineno)
            frame = frame.f_back
        if not tracer._frames:
            return None
        sys.settrace(tracer._global)
        return tracer

    def pass_over(self) -> None:
        """Take the number as it is now for known: no line is searched for its last change."""
        self._value = self._number()

    def stop(self) -> list[tuple[CodeType, int]]:
        """Stop tracing. Returns the lines that changed the number, as far as they were seen."""
        self._stop_tracing()
        for frame in self._frames:
            variables(frame)  # clears the dictionary of variables that tracing has left on it
        self._frames.clear()
        if not self._over():
            self._compare()
        return list(self._found)

    def _over(self) -> bool:
        enough = len(self._found) == FOUND_AT_MOST or self._spent > MORE_S
        return enough or self._lines > LINES_AT_MOST

    def _follows(self, code: CodeType) -> bool:
        return self._recorder.sites.kind(code) == "user" and not out_of_reach(code)

    def _stop_tracing(self) -> None:
        if getattr(sys.gettrace(), "__self__", None) is self:
            sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None

    def _global(self, frame: FrameType, event: str, argument: Any) -> Any:
        try:
            return self._local if self._follows(frame.f_code) else None
        except Exception as error:
            self._recorder.trouble("tracing", error, LOST)
            return None

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        try:
            if self._over():
                self._stop_tracing()
                return None
            if event == "line":
                self._lines += 1
                self._compare()
                self._line = (frame.f_code, frame.f_lineno)
            elif event == "return":
                self._compare()
                self._line = self._returns_to(frame.f_back)
        except Exception as error:
            frame.f_trace = None
            if getattr(sys.gettrace(), "__self__", None) is self:
                sys.settrace(None)
            self._recorder.trouble("tracing", error, LOST)
            return None
        return self._local

    def _returns_to(self, frame: FrameType | None) -> tuple[CodeType, int] | None:
        """The line of the user's code that a function returns into, which is not finished yet."""
        while frame is not None and not self._follows(frame.f_code):
            frame = frame.f_back
        return (frame.f_code, frame.f_lineno) if frame is not None else self._line

    def _compare(self) -> None:
        began = time.perf_counter()
        number = self._number()
        if number != self._value and self._line is not None:
            self._value = number
            self._found[self._line] = None
        elif self._found:
            self._spent += time.perf_counter() - began
