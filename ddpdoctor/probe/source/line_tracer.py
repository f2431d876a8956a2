"""Finds the user's lines that change a number, by looking after each line for a short while."""

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
FOUND_AT_MOST = 8
MORE_S = 0.05
"""Seconds that looking for more lines may take once one is found."""


class Tracer:
    """Follows the lines of the user's code in this thread. Leaves debuggers alone."""

    def __init__(self, recorder: Recorder, kind: str, number: Callable[[], int]) -> None:
        self.kind = kind
        self._active = recorder
        self._number = number
        self._value = number()
        self._line: tuple[CodeType, int] | None = None
        self._found: dict[tuple[CodeType, int], None] = {}
        self._spent = 0.0
        self._frames: list[FrameType] = []
        self._lines = 0

    @classmethod
    def start(cls, recorder: Recorder, kind: str, number: Callable[[], int]) -> Tracer | None:
        """None where another tracer (a debugger, coverage) is at work."""
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
        """What the number is now needs no line."""
        self._value = self._number()

    def stop(self) -> list[tuple[CodeType, int]]:
        """The lines after which the number had changed, as far as that was seen."""
        self._leave()
        for frame in self._frames:
            variables(frame)  # what tracing has left on it
        self._frames.clear()
        if not self._over():
            self._look()
        return list(self._found)

    def _over(self) -> bool:
        enough = len(self._found) == FOUND_AT_MOST or self._spent > MORE_S
        return enough or self._lines > LINES_AT_MOST

    def _follows(self, code: CodeType) -> bool:
        return self._active.sites.kind(code) == "user" and not out_of_reach(code)

    def _leave(self) -> None:
        if getattr(sys.gettrace(), "__self__", None) is self:
            sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None

    def _global(self, frame: FrameType, event: str, argument: Any) -> Any:
        try:
            return self._local if self._follows(frame.f_code) else None
        except Exception as error:
            self._active.trouble("tracing", error, LOST)
            return None

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        try:
            if self._over():
                self._leave()
                return None
            if event == "line":
                self._lines += 1
                self._look()
                self._line = (frame.f_code, frame.f_lineno)
            elif event == "return":
                self._look()
                self._line = self._goes_on(frame.f_back)
        except Exception as error:
            frame.f_trace = None
            if getattr(sys.gettrace(), "__self__", None) is self:
                sys.settrace(None)
            self._active.trouble("tracing", error, LOST)
            return None
        return self._local

    def _goes_on(self, frame: FrameType | None) -> tuple[CodeType, int] | None:
        """The user's line that a function returns into: the rest of it is still to run."""
        while frame is not None and not self._follows(frame.f_code):
            frame = frame.f_back
        return (frame.f_code, frame.f_lineno) if frame is not None else self._line

    def _look(self) -> None:
        began = time.perf_counter()
        number = self._number()
        if number != self._value and self._line is not None:
            self._value = number
            self._found[self._line] = None
        elif self._found:
            self._spent += time.perf_counter() - began
