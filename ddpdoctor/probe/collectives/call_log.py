"""The rank's own log of its calls: the ring for the last ones, folded blocks for all before."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from ...events import CALLERS, CallBlock, CallRun, CallSite, Place, Signature
from ...storage.call_ring import RingWriter, State
from ..recording import threads
from ..recording.code_locations import USER
from ..recording.recorder import Recorder
from ..source.loop_keys import LoopKey, keyed
from ..source.passthrough import passes_through
from ..source.statements import enclosing
from . import stack_server

NEW_GROUPS = -2
"""Number of the "group" in whose order new groups are created: the whole world."""

BLOCK = 256
"""Calls in a block, at most; blocks also end with optimizer steps."""
RUNS_KEPT = 20_000
"""Records of runs, at most (about a megabyte); beyond it only the ring goes on."""
BLOCKS_KEPT = 2_000
EMITTED_EVERY_S = 5.0

Key = tuple[Any, ...]


class _GroupLog:
    """Calls of one group that are not on record yet."""

    def __init__(self) -> None:
        self.next = 0
        self.codes: list[int] = []
        self.first = 0
        self.step = -1
        self.block = -1
        self.run_codes: list[int] = []
        self.run_first = 0
        self.run_step = -1
        self.every = 0
        self.repeat = 0


class Recurring:
    """What a wrapped model does by itself in every routine step.

    Attributes:
        codes: its signature, and the place where it was last; `outer`: the frames above that one,
            of the user's as many as a place has, each with its code and instruction.
    """

    __slots__ = ("codes", "group", "log", "outer", "signature")

    def __init__(self, group: int, log: _GroupLog, signature: int) -> None:
        self.group = group
        self.log = log
        self.signature = signature
        self.codes = (signature, -1)
        self.outer: list[tuple[CodeType, int]] | None = None

    def still_at(self, frame: FrameType) -> bool:
        """Whether a frame, which is where it was then, was called as it was then."""
        if self.outer is None:
            return False
        above = frame.f_back
        for code, instruction in self.outer:
            if above is None or above.f_code is not code or above.f_lasti != instruction:
                return False
            above = above.f_back
        return True


class CallLog:
    """One per recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.ring = RingWriter(recorder.directory / f"{recorder.stem}.ring")
        self.signatures: dict[Key, int] = {}
        self._of_models: dict[tuple[str, int], int] = {}
        self._sites: dict[Key, int] = {}
        # By identities and instructions, as in `Sites`.
        self._stacks: dict[Key, tuple[int, list[CodeType]]] = {}
        self._keyed: dict[int, LoopKey] = {}
        self._threads = threading.local()
        self._groups: dict[int, _GroupLog] = {}
        self._blocks: dict[tuple[int, ...], int] = {}
        self._runs = 0
        self._emitted_at = time.monotonic()
        self._works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        stack_server.listen(recorder, self.ring)

    def collective(
        self,
        group: int,
        op: str,
        site: int,
        tensor: Any = None,
        sized: bool = True,
        reduce_op: Any = None,
        root: int = -1,
        ranks: tuple[int, ...] = (),
    ) -> int:
        """Write a collective down; returns its number."""
        key: Key
        if tensor is None:
            key = (op, reduce_op, root, ranks)
        else:
            key = (op, reduce_op, root, tensor.shape, tensor.dtype, tensor.is_cpu)
        signature = self.signatures.get(key)
        if signature is None:
            signature = self._sign(key, op, tensor, sized, reduce_op, root, ranks)
        now = time.monotonic()
        number = self._log(group, signature, site, now)
        self.ring.moved(now)
        return number

    def of_model(self, group: int, op: str, frame: FrameType | None, model: int, now: float) -> int:
        """The same of what a wrapped model does by itself, -1 where it may be several, in a phase
        that the rank enters now."""
        key = op, model
        signature = self._of_models.get(key)
        if signature is None:
            signature = self._sign(key, op, None, False, None, -1, (), model=model)
            self._of_models[key] = signature
        return self._log(group, signature, self.at(frame), now)

    def recurring(self, group: int, op: str, model: int) -> Recurring | None:
        """What a wrapped model may do again by itself; None where it has not done it before."""
        log, signature = self._groups.get(group), self._of_models.get((op, model))
        return None if log is None or signature is None else Recurring(group, log, signature)

    def log_recurring(self, known: Recurring, frame: FrameType, moved: bool, now: float) -> int:
        """`of_model`, for what recurs; moved: the frame is at another instruction than then."""
        if moved or not known.still_at(frame):
            known.codes = known.signature, self.at(frame)
            known.outer = self._outer(frame)
        log = known.log
        index = log.next
        log.next = index + 1
        if not log.codes:
            log.first, log.step = index, self.ring.step
        log.codes += known.codes
        if len(log.codes) >= 2 * BLOCK:
            self._fold(known.group, log)
        return self.ring.write(known.group, index, *known.codes, -1, now)

    def _outer(self, frame: FrameType) -> list[tuple[CodeType, int]]:
        """The frames above one of the user's that `at` tells places apart by."""
        sites, outer = self.recorder.sites, frame.f_back
        found: list[tuple[CodeType, int]] = []
        users = 1
        while outer is not None and users < CALLERS:
            found.append((outer.f_code, outer.f_lasti))
            users += sites.kind(outer.f_code) is USER
            outer = outer.f_back
        return found

    def _log(self, group: int, signature: int, site: int, now: float) -> int:
        log = self._groups.get(group)
        if log is None:
            log = self._groups[group] = _GroupLog()
        index = log.next
        log.next = index + 1
        if not log.codes:
            log.first, log.step = index, self.ring.step
        log.codes += (signature, site)
        if len(log.codes) >= 2 * BLOCK:
            self._fold(group, log)
        return self.ring.write(group, index, signature, site, -1, now)

    def point_to_point(
        self,
        group: int,
        op: str,
        site: int,
        peer: int,
        sends: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
    ) -> int:
        """The same of messages between two ranks, which have no number in their group."""
        key: Key = (op, sends, receives)
        signature = self.signatures.get(key)
        if signature is None:
            signature = self._sign(key, op, None, False, None, -1, (), sends, receives)
        return self.ring.begin(group, -1, signature, site, peer)

    def issued(self, number: int, works: Iterable[Any]) -> None:
        """An asynchronous call: remember whose `wait` will end it, without keeping it alive."""
        self.ring.mark(number, State.RETURNED)
        for work in works:
            self._works[work] = number

    def number_of(self, work: Any) -> int | None:
        return self._works.get(work) if self._works else None

    def void(self, number: int) -> None:
        """The call was none: give its index to the next one, unless others followed already."""
        call = self.ring.call(number)
        log = self._groups.get(call[0]) if call else None
        if log is None or call is None or log.next != call[1] + 1 or not log.codes:
            self.ring.mark(number, State.DONE)
            return
        self.ring.mark(number, State.VOID)
        log.next -= 1
        del log.codes[-2:]

    def step_ended(self, step: int, now: float) -> None:
        """So many steps were taken; the rank goes over to another phase."""
        self.ring.step = step
        for group, log in self._groups.items():
            if log.codes:
                self._fold(group, log)
        if now - self._emitted_at > EMITTED_EVERY_S:
            self._emitted_at = now
            self.flush()

    def flush(self) -> None:
        """Put everything on record."""
        for group, log in self._groups.items():
            if log.codes:
                self._fold(group, log)
            self._emit_run(group, log)

    def _fold(self, group: int, log: _GroupLog) -> None:
        codes, log.codes = log.codes, []
        if log.repeat and codes == log.run_codes:
            apart = log.step - log.run_step
            if log.repeat == 1:
                log.every = apart
            if apart == log.repeat * log.every:
                log.repeat += 1
                return
        self._emit_run(group, log)
        key = tuple(codes)
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= BLOCKS_KEPT:
                return
            block = self._blocks[key] = len(self._blocks)
            self.recorder.emit(CallBlock(at=time.monotonic(), id=block, codes=key))
        log.block, log.run_first, log.run_step, log.repeat = block, log.first, log.step, 1
        log.run_codes, log.every = codes, 1

    def _emit_run(self, group: int, log: _GroupLog) -> None:
        if not log.repeat:
            return
        self._runs += 1
        if self._runs <= RUNS_KEPT:
            self.recorder.emit(
                CallRun(
                    at=time.monotonic(),
                    group=group,
                    first=log.run_first,
                    block=log.block,
                    repeat=log.repeat,
                    step=log.run_step,
                    every=log.every,
                )
            )
        log.repeat = 0

    def _sign(
        self,
        key: Key,
        op: str,
        tensor: Any,
        sized: bool,
        reduce_op: Any,
        root: int,
        ranks: tuple[int, ...],
        sends: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        model: int = -1,
    ) -> int:
        number = self.signatures[key] = len(self.signatures)
        self.recorder.emit(
            Signature(
                at=time.monotonic(),
                id=number,
                op=op,
                numel=int(tensor.numel()) if tensor is not None and sized else -1,
                dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                device="" if tensor is None else tensor.device.type,
                reduce_op="" if reduce_op is None else _reduction(reduce_op),
                root=root,
                shape=() if tensor is None else tuple(int(n) for n in tensor.shape),
                ranks=ranks,
                sends=sends,
                receives=receives,
                model=model,
            ),
            vital=True,
        )
        return number

    def here(self) -> int:
        """The number of the place that is communicating, of one in a loop over names that with the
        name it is made for."""
        frame = self.recorder.sites.user_frame(sys._getframe(1))
        number = self.at(frame)
        known = self._keyed.get(number) if frame is not None and self._keyed else None
        return number if known is None or frame is None else self._with_key(number, known, frame)

    def at(self, frame: FrameType | None) -> int:
        """The number of the place that a frame of the user's is at. For None, of the line that
        started this thread; -1 where that is unknown too."""
        sites = self.recorder.sites
        if frame is None:
            return self._of_thread()
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

    def _of_thread(self) -> int:
        known: int | None = getattr(self._threads, "site", None)
        if known is None:
            started = threads.started_at()
            known = -1 if started < 0 else self._sites.get((started,))
            if known is None:
                known = self._called((started,), (), started)
            self._threads.site = known
        return known

    def _emit_stack(self, frame: FrameType) -> tuple[int, list[CodeType]]:
        frames = self._users(frame)
        lines = tuple((f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames)
        number = self._sites.get(lines)
        if number is None:
            number = self._called(lines, self._places(frames))
            if chosen := keyed(frames):
                self._keyed[number] = chosen
        return number, [f.f_code for f in frames]

    def _users(self, frame: FrameType) -> list[FrameType]:
        """A frame of the user's and those that called it."""
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
            places = self._places(self._users(frame))
            known.sites[key] = self._called((number, key), places, key=key)
        return known.sites[key]

    def _places(self, frames: list[FrameType]) -> tuple[Place, ...]:
        places, called = [], None
        handed = True
        for frame in frames:
            code, line = frame.f_code, frame.f_lineno
            site = self.recorder.sites.place(code.co_filename, line, code.co_name)
            handed = handed and passes_through(code, line, called)
            places.append(Place(site, enclosing(code.co_filename, line), handed))
            called = code
        return tuple(places)

    def _called(
        self, line: Key, places: tuple[Place, ...], started: int = -1, key: str = ""
    ) -> int:
        number = self._sites[line] = len(self._sites)
        own = threads.current()
        called = CallSite(
            at=time.monotonic(),
            id=number,
            places=places,
            thread="" if own is None else own.name,
            shadows=_shadows(),
            started=started,
            key=key,
        )
        self.recorder.emit(called, vital=True)
        return number


_JOIN = os.path.join("torch", "distributed", "algorithms", "join.py"), "__exit__"


def _shadows() -> bool:
    """Whether torch's `Join` is at its end."""
    file, name = _JOIN
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def _reduction(op: Any) -> str:
    return str(getattr(op, "name", None) or op).rpartition(".")[2].strip("<>").split(":")[0]


def call_log_of(recorder: Recorder) -> CallLog | None:
    """The tape of this recorder; None where its file could not be made."""
    if recorder.call_log is None and not recorder.call_log_failed:
        with recorder.lock:  # threads that are ranks come at once
            if recorder.call_log is None:
                _make(recorder)
    return recorder.call_log


def _make(recorder: Recorder) -> None:
    try:
        recorder.call_log = CallLog(recorder)
    except Exception as error:
        recorder.call_log_failed = True
        recorder.trouble("ring", error, "the last calls before a kill, and hangs")


__all__ = ["NEW_GROUPS", "State", "CallLog", "call_log_of"]
