"""The call sites of a rank: lines of the program that communicate, with the lines that called
them."""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ...events import CALLERS, CallSite, Logged, Place
from ..recording import threads
from ..recording.code_locations import LIBRARY, USER
from ..recording.recorder import Recorder
from ..recording.threads import Threads
from ..source.ast_cache import source_of
from ..source.call_resolver import first_argument
from ..source.decorators import decorated
from ..source.loop_keys import LoopKey, keyed, no_name, setter
from ..source.loop_rounds import rounds
from ..source.passthrough import passes_through
from ..source.statements import enclosing, flags_set
from .call_origin import internal, shadows

Key = tuple[Any, ...]


class Names:
    """Who knows the names of what is communicated; set by the watchers that do.

    Attributes:
        of_object: the name of a parameter; empty if it has none.
        reduced: the number that a framework is reducing; None if it is doing something else.
    """

    def __init__(self) -> None:
        self.of_object: Callable[[Any], str] = no_name
        self.reduced: Callable[[Recorder], Logged | None] = lambda recorder: None


names = Names()


class _ReducedName(LoopKey):
    """A call site at which a framework may reduce numbers that have names."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(sys._getframe().f_code, ())
        self._recorder = recorder
        self.logged: Logged | None = None

    def key(self, frame: FrameType) -> str:
        self.logged = names.reduced(self._recorder)
        self.name = "" if self.logged is None else self.logged.name
        return f"name = {self.name!r}" if self.name else ""


class CallSites:
    """Numbers call sites as they occur, and records each the first time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._sites: dict[Key, int] = {}
        # Keyed by id(code) and instruction, as in `Sites`; the code objects are kept alive.
        self._stacks: dict[Key, tuple[int, list[CodeType]]] = {}
        self._keyed: dict[int, LoopKey] = {}
        self._threads = threading.local()

    def here(self) -> int:
        """The number of the call site that is executing; one in a loop over names has a number per
        name."""
        frame = self.recorder.sites.user_frame(sys._getframe(1))
        number = self.at(frame)
        known = self._keyed.get(number) if frame is not None and self._keyed else None
        return number if known is None or frame is None else self._with_key(number, known, frame)

    def at(self, frame: FrameType | None) -> int:
        """The number of the call site that a frame of the user's is at; for None, that of the line
        that started this thread, or -1 if unknown."""
        sites = self.recorder.sites
        if frame is None:
            return self._thread_site()
        stack = [id(frame.f_code), frame.f_lasti]
        kinds, outer = sites.kinds, frame.f_back
        while outer is not None and len(stack) < 2 * CALLERS:
            code = outer.f_code
            if (kinds.get(code.co_filename) or sites.kind(code)) is USER:
                stack += (id(code), outer.f_lasti)
            outer = outer.f_back
        key = tuple(stack)
        known = self._stacks.get(key)
        if known is None:
            known = self._stacks[key] = self._emit_stack(frame)
        return known[0]

    def _thread_site(self) -> int:
        known: int | None = getattr(self._threads, "site", None)
        if known is None:
            started = Threads.current.started_at()
            known = -1 if started < 0 else self._sites.get((started,))
            if known is None:
                known = self._emit_call_site((started,), (), started)
            self._threads.site = known
        return known

    def _emit_stack(self, frame: FrameType) -> tuple[int, list[CodeType]]:
        frames = self._user_frames(frame)
        lines = tuple((f.f_code.co_filename, line_of(f), f.f_code.co_name) for f in frames)
        number = self._sites.get(lines)
        if number is None:
            through = self._through(frame)
            number = self._emit_call_site(
                lines, self._places(frames), through=through, within=_module(frames)
            )
            chosen = keyed(frames, names.of_object)
            if chosen is None and through:
                chosen = _ReducedName(self.recorder)
            if chosen is not None:
                self._keyed[number] = chosen
        return number, [f.f_code for f in frames]

    def _user_frames(self, frame: FrameType) -> list[FrameType]:
        """A frame of the user's, and up to `CALLERS` in all of the user's that called it."""
        frames, outer = [frame], frame.f_back
        while outer is not None and len(frames) < CALLERS:
            if self.recorder.sites.kind(outer.f_code) is USER:
                frames.append(outer)
            outer = outer.f_back
        return frames

    def _with_key(self, number: int, known: LoopKey, frame: FrameType) -> int:
        key = known.key(frame)
        if known.over:
            del self._keyed[number]
        if not key:
            return number
        if key not in known.sites:
            frames = self._user_frames(frame)
            known.sites[key] = self._emit_call_site(
                (number, key),
                self._places(frames),
                key=key,
                through=self._through(frame),
                set_at=self._set_at(known, frames),
                within=_module(frames),
            )
        return known.sites[key]

    def _set_at(self, known: LoopKey, frames: list[FrameType]) -> Place | None:
        """The line of the program that sets the entry with the last key, or logs it."""
        if isinstance(known, _ReducedName) and known.logged is not None:
            return Place(known.logged.site)
        found = setter(known.name, (f.f_code.co_filename for f in frames))
        if found is None:
            return None
        site = self.recorder.sites.place(*found)
        return Place(site, enclosing(found.file, found.line))

    def _places(self, frames: list[FrameType]) -> tuple[Place, ...]:
        places, called = [], None
        handed = True  # as long as all functions so far only pass their arguments on
        for frame in frames:
            code, line = frame.f_code, line_of(frame)
            site = self.recorder.sites.place(code.co_filename, line, code.co_name)
            handed = handed and passes_through(code, line, called)
            around = enclosing(code.co_filename, line) + decorated(frame, self._is_users)
            flags = flags_set(code.co_filename, line)
            places.append(Place(site, around, handed, rounds(around, frame), flags))
            called = code
        return tuple(places)

    def _is_users(self, code: CodeType) -> bool:
        return self.recorder.sites.kind(code) is USER

    def _through(self, frame: FrameType) -> str:
        """The name of the library's function that a frame of the user's is in."""
        inner: FrameType | None = sys._getframe(1)
        while inner is not None and inner.f_back is not frame:
            inner = inner.f_back
        library = inner is not None and self.recorder.sites.kind(inner.f_code) is LIBRARY
        return inner.f_code.co_name if inner is not None and library else ""

    def _emit_call_site(
        self,
        line: Key,
        places: tuple[Place, ...],
        started: int = -1,
        key: str = "",
        through: str = "",
        set_at: Place | None = None,
        within: str = "",
    ) -> int:
        number = self._sites[line] = len(self._sites)
        own = threads.current()
        called = CallSite(
            at=time.monotonic(),
            id=number,
            places=places,
            thread="" if own is None else own.name,
            shadows=shadows(),
            started=started,
            key=key,
            set_at=set_at,
            internal=internal(self.recorder) if places else None,
            through=through,
            within=within,
        )
        self.recorder.emit(called, vital=True)
        return number


def line_of(frame: FrameType) -> int:
    """The line that a frame is at; of a conditional expression, that of the whole: both arms of
    `all_reduce(a) if first else all_reduce(b)` are one call."""
    line = frame.f_lineno
    source = source_of(frame.f_code.co_filename)
    around = source.around(line) if source is not None else []
    return next((node.lineno for node in around if isinstance(node, ast.IfExp)), line)


def _module(frames: list[FrameType]) -> str:
    """The class of the innermost module whose `forward` is among these frames."""
    import torch.nn

    for frame in frames:
        if frame.f_code.co_name == "forward":
            owner = first_argument(frame)
            if isinstance(owner, torch.nn.Module):
                return type(owner).__name__
    return ""
