"""The rank's log of its calls: the last ones in the ring file, all before as blocks in the record.

A block is the calls of one group between two optimizer steps; equal blocks in a row are recorded as
one run, so that the log of a steady training does not grow.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from ...events import CALLERS, CallBlock, CallRun, CallSite, Place, Signature
from ...storage.call_ring import State
from ..recording import threads
from ..recording.code_locations import LIBRARY, USER
from ..recording.recorder import Recorder
from ..recording.threads import Threads
from ..source.decorators import decorated
from ..source.key_setters import setter
from ..source.loop_keys import LoopKey, keyed
from ..source.loop_rounds import rounds
from ..source.passthrough import passes_through
from ..source.statements import enclosing, flags_set
from . import stack_server
from .call_hooks import reduction_name
from .call_origin import internal, shadows
from .group_log import GroupLog, Recurring
from .timed_ring import TimedRing

NEW_GROUPS = -2
"""Number of the pseudo-group that `new_group` calls are numbered in: all ranks must make these in
the same order, whichever group they create."""

BLOCK = 256
"""Calls in a block, at most; blocks also end with optimizer steps."""
RUNS_KEPT = 20_000
"""Runs recorded, at most (about a megabyte); after that only the ring goes on."""
BLOCKS_KEPT = 2_000
"""Distinct blocks recorded, at most: where each differs from the last, none will be met again."""
EMITTED_EVERY_S = 5.0
"""Seconds between two records of runs that are still going on: what is not on record is lost if the
process is killed, but for the ring."""

Key = tuple[Any, ...]


class CallLog:
    """The log of one recorder's calls.

    Attributes:
        ring: the ring file, see `storage.call_ring`.
        signatures: numbers of the signatures recorded so far: of operation, shape, type and so on.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.ring = TimedRing(recorder.directory / f"{recorder.stem}.ring", recorder)
        self.signatures: dict[Key, int] = {}
        self._of_models: dict[tuple[str, int, tuple[int, ...]], int] = {}
        self._sites: dict[Key, int] = {}
        # Keyed by id(code) and instruction, as in `Sites`; the code objects are kept alive.
        self._stacks: dict[Key, tuple[int, list[CodeType]]] = {}
        self._keyed: dict[int, LoopKey] = {}
        self._threads = threading.local()
        self._groups: dict[int, GroupLog] = {}
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
        """Log a collective that begins; returns its number in the ring.

        Args:
            sized: its number of elements must be equal on all ranks.
            ranks: the members, for `new_group`.
        """
        key: Key
        if tensor is None:
            key = (op, reduce_op, root, ranks)
        else:
            key = (op, reduce_op, root, tensor.shape, tensor.dtype, tensor.is_cpu)
        signature = self.signatures.get(key)
        if signature is None:
            signature = self._add_signature(key, op, tensor, sized, reduce_op, root, ranks)
        now = time.monotonic()
        number = self._log(group, signature, site, now)
        self.ring.moved(now)
        return number

    def logged(self, group: int) -> int:
        """How many collectives of a group were logged so far."""
        known = self._groups.get(group)
        return known.next if known else 0

    def of_model(
        self,
        group: int,
        op: str,
        frame: FrameType | None,
        model: int,
        now: float,
        models: tuple[int, ...] = (),
    ) -> int:
        """Log a collective that DDP issues itself; returns its number in the ring.

        The caller then enters the phase in the ring's header, which counts as progress.

        Args:
            model: number of the wrapped model, -1 if it may be one of several.
            models: in a backward through several, all of them.
        """
        key = op, model, models
        signature = self._of_models.get(key)
        if signature is None:
            signature = self._add_signature(
                key, op, None, False, None, -1, (), model=model, models=models
            )
            self._of_models[key] = signature
        return self._log(group, signature, self.at(frame), now)

    def recurring(self, group: int, op: str, model: int) -> Recurring | None:
        """A collective that DDP issues itself and may issue again; None if it has not yet."""
        log, signature = self._groups.get(group), self._of_models.get((op, model, ()))
        return None if log is None or signature is None else Recurring(group, log, signature)

    def log_recurring(self, known: Recurring, frame: FrameType, moved: bool, now: float) -> int:
        """Log a collective as `of_model` does, on the fast path.

        Args:
            moved: the frame is at another instruction than last time.
        """
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

    def passed(self, known: Recurring, step: int) -> None:
        """Log a call of a light step, which was only written to the ring and numbered.

        Args:
            step: optimizer steps before it.
        """
        log = known.log
        if not log.codes:
            log.first, log.step = log.next - log.behind, step
        log.behind -= 1
        log.codes += known.codes
        if len(log.codes) >= 2 * BLOCK:
            self._fold(known.group, log)

    def _outer(self, frame: FrameType) -> list[tuple[CodeType, int]]:
        """Code and instruction of the frames above one, as far as `at` distinguishes call sites."""
        sites, outer = self.recorder.sites, frame.f_back
        found: list[tuple[CodeType, int]] = []
        users = 1
        while outer is not None and users < CALLERS:
            found.append((outer.f_code, outer.f_lasti))
            users += sites.kind(outer.f_code) is USER
            outer = outer.f_back
        return found

    # The body is repeated in `log_recurring`, to save a call in every step.
    def _log(self, group: int, signature: int, site: int, now: float) -> int:
        log = self._groups.get(group)
        if log is None:
            log = self._groups[group] = GroupLog()
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
        """Log a point-to-point call that begins; returns its number in the ring. It has no number
        in its group: only two ranks make it.

        Args:
            sends, receives: peers of a batch of messages; `peer` is -1 then.
        """
        key: Key = (op, sends, receives)
        signature = self.signatures.get(key)
        if signature is None:
            signature = self._add_signature(key, op, None, False, None, -1, (), sends, receives)
        return self.ring.begin(group, -1, signature, site, peer)

    def issued(self, number: int, works: Iterable[Any]) -> None:
        """An asynchronous call has returned: remember its works, whose `wait` will end it."""
        self.ring.mark(number, State.RETURNED)
        for work in works:
            self._works[work] = number

    def number_of(self, work: Any) -> int | None:
        """The number in the ring of the call that a `Work` belongs to; None if unknown."""
        return self._works.get(work) if self._works else None

    def void(self, number: int) -> None:
        """A logged call turned out not to happen: remove it, so that the next one gets its number.
        If others have followed, it stays."""
        call = self.ring.call(number)
        log = self._groups.get(call[0]) if call else None
        if log is None or call is None or log.next != call[1] + 1 or not log.codes:
            self.ring.mark(number, State.DONE)
            return
        self.ring.mark(number, State.VOID)
        log.next -= 1
        del log.codes[-2:]

    def step_ended(self, step: int, now: float) -> None:
        """End the blocks: so many optimizer steps were taken. The caller then enters a phase."""
        # As `TimedRing.step_ended` and the usual case of `_fold`, without their calls.
        ring = self.ring
        ring.step, ring.thread = step, get_ident()
        for group, log in self._groups.items():
            repeat = log.repeat
            if (
                repeat
                and log.codes == log.run_codes
                and log.step - log.run_step == repeat * log.every
            ):
                log.codes = []
                log.repeat = repeat + 1
            elif log.codes:
                self._fold(group, log)
        if now - self._emitted_at > EMITTED_EVERY_S:
            self._emitted_at = now
            self.flush()

    def flush(self) -> None:
        """Record all calls so far."""
        for group, log in self._groups.items():
            if log.codes:
                self._fold(group, log)
            self._emit_run(group, log)

    def _fold(self, group: int, log: GroupLog) -> None:
        """End a block: one more of the current run if it is equal and comes in time, else the first
        of a new run."""
        codes, log.codes = log.codes, []
        if log.repeat and codes == log.run_codes:
            steps = log.step - log.run_step
            if log.repeat == 1:
                log.every = steps
            if steps == log.repeat * log.every:
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

    def _emit_run(self, group: int, log: GroupLog) -> None:
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

    def _add_signature(
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
        models: tuple[int, ...] = (),
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
                reduce_op="" if reduce_op is None else reduction_name(reduce_op),
                root=root,
                shape=() if tensor is None else tuple(int(n) for n in tensor.shape),
                ranks=ranks,
                sends=sends,
                receives=receives,
                model=model,
                models=models,
            ),
            vital=True,
        )
        return number

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
        lines = tuple((f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames)
        number = self._sites.get(lines)
        if number is None:
            through = self._through(frame)
            number = self._emit_call_site(lines, self._places(frames), through=through)
            if chosen := keyed(frames):
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
            set_at = self._set_at(known.name, frames)
            known.sites[key] = self._emit_call_site(
                (number, key), self._places(frames), key=key, set_at=set_at
            )
        return known.sites[key]

    def _set_at(self, name: str, frames: list[FrameType]) -> Place | None:
        """The line of the program that sets the entry with this name."""
        found = setter(name, (f.f_code.co_filename for f in frames))
        if found is None:
            return None
        site = self.recorder.sites.place(*found)
        return Place(site, enclosing(found.file, found.line))

    def _places(self, frames: list[FrameType]) -> tuple[Place, ...]:
        places, called = [], None
        handed = True  # as long as all functions so far only pass their arguments on
        for frame in frames:
            code, line = frame.f_code, frame.f_lineno
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
        )
        self.recorder.emit(called, vital=True)
        return number


def call_log_of(recorder: Recorder) -> CallLog | None:
    """The call log of a recorder; None if its ring file could not be made."""
    if recorder.call_log is None and not recorder.call_log_failed:
        with recorder.lock:  # with threads as ranks several arrive at once
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
