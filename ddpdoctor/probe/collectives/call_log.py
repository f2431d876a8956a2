"""The rank's log of its calls: the last ones in the ring file, all before as blocks in the record.

A block is the calls of one group between two optimizer steps; equal blocks in a row are recorded as
one run, so that the log of a steady training does not grow.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from ...events import CALLERS, CallBlock, CallRun, Event, Signature
from ...storage.call_ring import State
from ..recording.code_locations import USER
from ..recording.recorder import Recorder
from . import stack_server
from .call_hooks import reduction_name
from .call_sites import CallSites
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
        here, at: of `CallSites`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.ring = TimedRing(recorder.directory / f"{recorder.stem}.ring", recorder)
        self.signatures: dict[Key, int] = {}
        self._of_models: dict[tuple[str, int, tuple[int, ...], bool], int] = {}
        call_sites = CallSites(recorder)
        self.here, self.at = call_sites.here, call_sites.at
        self._groups: dict[int, GroupLog] = {}
        self._blocks: dict[tuple[int, ...], int] = {}
        self._runs = 0
        self._emitted_at = time.monotonic()
        # Other threads make calls, too. Events are written once it is released: writing one may
        # log the calls of light steps.
        self._lock = threading.RLock()
        self._due: list[Event] = []
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

    def counts(self) -> tuple[int, ...]:
        """How many collectives of each group were logged so far: `g0, n0, g1, n1, ...`."""
        return tuple(n for group, log in [*self._groups.items()] for n in (group, log.next))

    def of_model(
        self,
        group: int,
        op: str,
        frame: FrameType | None,
        model: int,
        now: float,
        models: tuple[int, ...] = (),
        *,
        rebuilds: bool = False,
    ) -> int:
        """Log a collective that DDP issues itself; returns its number in the ring.

        The caller then enters the phase in the ring's header, which counts as progress.

        Args:
            model: number of the wrapped model, -1 if it may be one of several.
            models: in a backward through several, all of them.
            rebuilds: in a forward, DDP also rebuilds its buckets.
        """
        key = op, model, models, rebuilds
        signature = self._of_models.get(key)
        if signature is None:
            signature = self._add_signature(
                key, op, None, False, None, -1, (), model=model, models=models, rebuilds=rebuilds
            )
            self._of_models[key] = signature
        return self._log(group, signature, self.at(frame), now)

    def recurring(self, group: int, op: str, model: int) -> Recurring | None:
        """A collective that DDP issues itself and may issue again; None if it has not yet."""
        log, signature = self._groups.get(group), self._of_models.get((op, model, (), False))
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
        with self._lock:
            index = log.next
            log.next = index + 1
            if not log.codes:
                log.first, log.step = index, self.ring.step
            log.codes += known.codes
            if len(log.codes) >= 2 * BLOCK:
                self._fold(known.group, log)
            number = self.ring.write(known.group, index, *known.codes, -1, now)
        if self._due:
            self._emit()
        return number

    def passed(self, known: Recurring, step: int) -> None:
        """Log a call of a light step, which was only written to the ring and numbered.

        Args:
            step: optimizer steps before it.
        """
        log = known.log
        with self._lock:
            if not log.codes:
                log.first, log.step = log.next - log.behind, step
            log.behind -= 1
            log.codes += known.codes
            if len(log.codes) >= 2 * BLOCK:
                self._fold(known.group, log)
        if self._due:
            self._emit()

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
        with self._lock:
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
            number = self.ring.write(group, index, signature, site, -1, now)
        if self._due:
            self._emit()
        return number

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
        with self._lock:
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
        with self._lock:
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
        with self._lock:
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
        if self._due:
            self._emit()
        if now - self._emitted_at > EMITTED_EVERY_S:
            self._emitted_at = now
            self.flush()

    def flush(self) -> None:
        """Record all calls so far."""
        with self._lock:
            for group, log in self._groups.items():
                if log.codes:
                    self._fold(group, log)
                self._end_run(group, log)
        self._emit()

    def _emit(self) -> None:
        """Write the events that are due."""
        with self._lock:
            due, self._due = self._due, []
        for event in due:
            self.recorder.emit(event)

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
        self._end_run(group, log)
        key = tuple(codes)
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= BLOCKS_KEPT:
                return
            block = self._blocks[key] = len(self._blocks)
            self._due.append(CallBlock(at=time.monotonic(), id=block, codes=key))
        log.block, log.run_first, log.run_step, log.repeat = block, log.first, log.step, 1
        log.run_codes, log.every = codes, 1

    def _end_run(self, group: int, log: GroupLog) -> None:
        if not log.repeat:
            return
        self._runs += 1
        if self._runs <= RUNS_KEPT:
            self._due.append(
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
        rebuilds: bool = False,
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
                rebuilds=rebuilds,
            ),
            vital=True,
        )
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
