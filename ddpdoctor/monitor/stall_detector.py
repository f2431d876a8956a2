"""Finds runs that make no progress, and decides whether to stop them.

It measures which ranks have made no progress since when, asks them for their stacks, and records
both. What that means is decided by the checks of the family `hang`, the same ones that read the
folder afterwards: a run is stopped where one of them proves a deadlock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..events import (
    Event,
    FlightLog,
    RankExiting,
    RankStood,
    StackFrame,
    StallOver,
    StallSeen,
    Worker,
)
from ..report.findings import Check, Confidence, Finding
from ..run import Rank, Run, ranks_do, ranks_text
from ..storage import stack_dumps
from ..storage.call_ring import ASK_STACKS, Phase, Ring, ask_address
from . import system
from .spinning import devices_wait, may_spin

if TYPE_CHECKING:
    from ..config import Options

STACK_SIGNAL = signal.SIGRTMAX - 3
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals on which faulthandler writes the rank's stack."""
QUIET_S = 1.0
"""A pause shorter than this is no stall: gloo itself sleeps for tenths of a second."""
LEAST_S = 10.0
"""The shortest stall that is reported without a proof, unless --hang-after says otherwise."""
FIRST_STEP_S = 30.0
"""The same before the first step, in which data sets are read and models compiled."""
BEGUN = 30
"""A rank that never steps an optimizer has begun after this many calls."""
NOTICED_S = 5.5
"""How long after the end of a process its peers must have noticed. The checks expect it a little
earlier, so that a look at this moment finds their verdict."""
PATIENCE = 1.5
"""How much longer than the longest pause so far that ended well a pause may be."""
ANSWERS_WITHIN_S, UNANSWERED_S = 1.0, 0.5
"""Seconds a rank has to write its stack before it counts as silent; after the second number it is
sent a signal."""
OTHERS_S = 3.0
"""What other nodes have seen of their ranks arrives in that time; nothing is stopped for an unknown
reason before."""
BUSY = 0.3
"""Share of a core. While every rank computes, none waits for another, and the limit is
`WHILE_BUSY` times as long."""
WHILE_BUSY = 6
THREADS_LISTED = 20
WORKERS_LISTED, WORKERS_ASKED, WORKER_ANSWERS_S = 32, 8, 0.3
"""Workers of a rank that are recorded, those asked for their stacks, and seconds for an answer."""
REMIND_S = 30.0
"""How often the user is told that a stall goes on."""
LOOK_SHARE = 20
"""After an examination the next one waits this many times as long as it took."""


@dataclass
class RankProgress:
    """Progress of one rank.

    Attributes:
        moved_at: `Ring.progress_at` at the last look, -1 before it; changed: when that last changed
            (seconds on the monitor's clock).
        cpu_s: CPU seconds wanted until `cpu_at`; cpu: the share of a core since the look before.
    """

    moved_at: float = -1.0
    changed: float = 0.0
    cpu_s: float = 0.0
    cpu_at: float = 0.0
    cpu: float = 0.0


@dataclass
class Stall:
    """A time in which the run makes no progress.

    Attributes:
        since: when it began; pids: the processes of the ranks then.
        asked: when the ranks were asked for their stacks; sizes: of their stack files before that;
            signalled: the silent ones were sent a signal.
        recorded: it was written to the folder; noticed: the user was informed; proven: it cannot
            resolve.
        told: when the user was last informed.
        moved: when a rank was first seen to go on.
        judged, suspected: the states for which the checks were asked last, so that they are not
            asked again about the same one.
    """

    since: float
    pids: frozenset[int] = frozenset()
    asked: float = 0.0
    moved: float = 0.0
    sizes: dict[int, int] | None = None
    signalled: bool = False
    recorded: bool = False
    noticed: bool = False
    told: float = 0.0
    proven: bool = False
    judged: tuple[object, ...] = ()
    suspected: tuple[object, ...] = ()


class StallDetector:
    """Watches the ranks of this node; call `look` at every tick of the monitor.

    Attributes:
        notices: lines for the user that were not printed yet.
    """

    def __init__(
        self,
        options: Options,
        write: Callable[[Event], None],
        checks: Callable[[], Sequence[Check]],
    ) -> None:
        self.options = options
        self.notices: list[str] = []
        self._write = write
        self._checks = checks
        self._ranks: dict[int, RankProgress] = {}
        self._longest = 0.0
        self._stall: Stall | None = None
        self._attempt = 0
        self._ending = False
        self._next_look = 0.0
        self._stood_once: set[int] = set()
        self._finished: set[int] = set()

    def take_notices(self) -> list[str]:
        """The notices, to be printed now."""
        recorded, self.notices = self.notices, []
        return recorded

    def look(self, run: Run, pids: set[int]) -> str | None:
        """Look at all ranks once; why the run must be stopped, None where it need not."""
        if self._ending:
            _release(pids)
            return None
        run.now = now = time.monotonic()
        if run.attempt != self._attempt:
            self._attempt, self._stall, self._ranks = run.attempt, None, {}
            self._stood_once = set()
        live = [r for r in run.ranks.values() if r.pid in pids]
        for rank in live:
            self._measure(rank, now)
        since = self._still_since(run, live, now)
        stall = self._stall
        if since is None or now - since < QUIET_S:
            if stall is not None:
                self._check_over(run, live, stall, now)
            return None
        if stall is None or since > stall.since + QUIET_S:
            if stall is not None and not self._check_over(run, live, stall, now):
                return None
            stall = self._stall = Stall(since, pids=frozenset(r.pid for r in live))
        return self._examine_stall(run, live, stall, now)

    def finish(self, run: Run, pids: set[int]) -> None:
        """Record where ranks were as they crashed or got SIGTERM, from what faulthandler wrote."""
        seen = {e.rank for n in run.nodes.values() for e in n.of(RankStood)} | self._stood_once
        for rank in run.ranks.values():
            if rank.pid not in pids or rank.ended is None or rank.pid in self._finished:
                continue
            self._finished.add(rank.pid)
            dump = stack_dumps.read(stack_dumps.beside(rank.path))
            frames = stack_dumps.crash(dump) if rank.ended.signal in CRASHES else ()
            crashed = bool(frames)
            if rank.ended.signal == signal.SIGTERM and rank.rank not in seen:
                frames = stack_dumps.main_thread(dump)
            if frames:
                self._write(
                    RankStood(
                        at=rank.ended.at, rank=rank.rank, pid=rank.pid, frames=frames,
                        attempt=run.attempt, crashed=crashed,
                        native=crashed and stack_dumps.of_native_thread(dump),
                    )
                )  # fmt: skip

    def hang_after(self, run: Run) -> float:
        """Seconds without progress that count as a stall."""
        asked = self._stall.asked if self._stall else 0.0
        busy = WHILE_BUSY if self._computes() and not devices_wait(run, asked) else 1
        if self.options.hang_after is not None:
            return busy * self.options.hang_after
        begun = any(r.steps for r in run.ranks.values()) or any(
            r.ring is not None and r.ring.count > BEGUN
            for r in run.ranks.values()
            if r.rank in self._ranks
        )
        least = LEAST_S if begun else FIRST_STEP_S
        times = [t for r in run.ranks.values() if (t := r.step_time()) is not None]
        return max(busy * least, PATIENCE * self._longest, 3 * max(times, default=0.0))

    def _computes(self) -> bool:
        return all(s.cpu > BUSY for s in self._ranks.values())

    def _measure(self, rank: Rank, now: float) -> None:
        seen = self._ranks.setdefault(rank.rank, RankProgress(changed=now, cpu_at=now))
        moved_at = rank.ring.progress_at if rank.ring else 0.0
        if moved_at != seen.moved_at:
            self._longest = max(self._longest, now - seen.changed if seen.moved_at >= 0 else 0.0)
            seen.moved_at, seen.changed = moved_at, now
        if now - seen.cpu_at >= QUIET_S or not seen.cpu_s:
            used = system.wanted_seconds(rank.pid)
            if seen.cpu_s and now > seen.cpu_at:
                seen.cpu = max(0.0, used - seen.cpu_s) / (now - seen.cpu_at)
            seen.cpu_s, seen.cpu_at = used, now

    def _still_since(self, run: Run, live: list[Rank], now: float) -> float | None:
        """Since when a rank has waited in a call, or all have done nothing; None for neither."""
        if not live:
            return None
        waiting = [self._ranks[r.rank].changed for r in live if waits(r.ring)]
        if waiting:
            return min(waiting)
        begun = [r for r in live if r.ring is not None]
        if len(begun) < len(live):
            return None
        return max(self._ranks[r.rank].changed for r in live)

    def _check_over(self, run: Run, live: list[Rank], stall: Stall, now: float) -> bool:
        """Whether the stall is over: ranks go on, and do not just fail one after the other."""
        failed = any(r.exception or r.latest(RankExiting) for r in run.ranks.values())
        if stall.recorded:
            stall.moved = stall.moved or now
            if failed or stall.pids - {r.pid for r in live} or now - stall.moved < QUIET_S:
                return False
            lasted = now - stall.since
            self._write(StallOver(at=now, lasted_s=lasted, attempt=self._attempt))
            if stall.noticed:
                self.notices.append(f"the run goes on, after {lasted:.0f} s")
        self._stall = None
        return True

    def _examine_stall(self, run: Run, live: list[Rank], stall: Stall, now: float) -> str | None:
        limit = self.hang_after(run)
        late = now - stall.since >= limit
        if not stall.asked:
            # Ranks are asked only where a deadlock is likely: a signal may interrupt a library.
            early = now - stall.since >= limit / WHILE_BUSY
            spins = early and self._computes() and may_spin(run)
            if not (late or spins) and not self._suspects(run, live, stall, limit, now):
                return None
            self._ask_for_stacks(live, stall, now)
            return None
        if not stall.recorded and not self._answered(live, stall, now):
            return None
        if stall.noticed and now - stall.told >= REMIND_S:
            self.notices.append(self._reminder(live, stall, now))
            stall.told = now
        state = (late, stall.recorded, *self._state(run, live, limit, now))
        if state == stall.judged:
            return None
        stall.judged = state
        findings = self._findings(run)
        proof = next((f for f in findings if deadlocked(f)), None)
        if (proof is not None and not stall.proven) or (late and not stall.recorded):
            stall.recorded, stall.proven = True, proof is not None
            self._record(run, live, stall, limit, now)
        reason = None
        if proof is None and not findings and run.info.nodes > 1 and now - stall.asked < OTHERS_S:
            stall.judged = ()
        else:
            reason = self._stop(proof, findings, late)
        if stall.recorded and not stall.noticed and findings and reason is None:
            # A suspicion rests on what was just recorded: the checks see it at the next look.
            stall.noticed, stall.told = True, now
            self.notices.append(_notice(findings[0], now - stall.since))
        return reason

    def _reminder(self, live: list[Rank], stall: Stall, now: float) -> str:
        """What has changed since the user was last informed."""
        seen = {r.rank: self._ranks[r.rank] for r in live}
        moved = [n for n, s in seen.items() if s.changed > stall.told]
        busy = [n for n, s in seen.items() if s.cpu >= BUSY]
        told = f"{ranks_text(moved)} went on" if moved else "no rank went on"
        computes = f"; {ranks_do(busy, 'compute')}" if busy else ""
        return f"still no progress after {now - stall.since:.0f} s: {told} meanwhile{computes}"

    def _state(self, run: Run, live: list[Rank], limit: float, now: float) -> tuple[object, ...]:
        """What the verdict depends on: the progress of every rank, which of them are still, and
        which are gone for so long that the others would have noticed."""
        times = QUIET_S, limit + QUIET_S
        seen = [self._ranks[r.rank] for r in live]
        gone = [r.ended.at for r in run.ranks.values() if r.ended]
        return (
            *((s.moved_at, *(now - s.changed >= t for t in times)) for s in seen),
            *(now - at >= NOTICED_S for at in gone),
        )

    def _suspects(self, run: Run, live: list[Rank], stall: Stall, limit: float, now: float) -> bool:
        """Whether the records prove a deadlock already. Bounded by `LOOK_SHARE` in its cost."""
        state = self._state(run, live, limit, now)
        if state == stall.suspected or now < self._next_look:
            return False
        stall.suspected = state
        found = any(deadlocked(f) for f in self._findings(run))
        self._next_look = now + LOOK_SHARE * (time.monotonic() - now)
        return found

    def _stop(self, proof: Finding | None, findings: list[Finding], late: bool) -> str | None:
        if proof is not None and self.options.on_hang in ("auto", "stop"):
            self._ending = True
            return proof.summary
        if late and self.options.on_hang == "stop":
            self._ending = True
            return findings[0].summary if findings else "no rank makes progress"
        return None

    def _findings(self, run: Run) -> list[Finding]:
        found: list[Finding] = []
        for check in self._checks():
            with contextlib.suppress(Exception):  # the report runs the check again, and says so
                found += check.examine(run)
        return sorted(found, key=lambda f: (f.confidence is not Confidence.PROVEN, f.code))

    def _ask_for_stacks(self, live: list[Rank], stall: Stall, now: float) -> None:
        stall.asked, stall.signalled = now, False
        stall.sizes = {r.rank: _size(stack_dumps.beside(r.path)) for r in live}
        for rank in live:
            ask(rank)

    def _answered(self, live: list[Rank], stall: Stall, now: float) -> bool:
        silent = _silent(live, stall)
        if silent and not stall.signalled and now - stall.asked >= UNANSWERED_S:
            stall.signalled = True
            for rank in silent:
                _signal_for_stack(rank)
        if now - stall.asked >= ANSWERS_WITHIN_S:
            return True
        return not silent and all(
            any(log.at >= stall.asked for log in r.of(FlightLog)) for r in live
        )

    def _record(self, run: Run, live: list[Rank], stall: Stall, limit: float, now: float) -> None:
        """Record where every rank is, then that the run makes no progress."""
        if now - stall.asked > 2 * ANSWERS_WITHIN_S:  # the stacks are old by now
            self._ask_for_stacks(live, stall, now)
            until = now + ANSWERS_WITHIN_S
            while _silent(live, stall) and (at := time.monotonic()) < until:
                self._answered(live, stall, at)
                time.sleep(0.05)
        for rank in live:
            self._stood_once.add(rank.rank)
            self._write(self._rank_stood(rank, stall, now))
        self._write(
            StallSeen(
                at=now,
                since=stall.since,
                hang_after=limit,
                proven=stall.proven,
                attempt=run.attempt,
            )
        )

    def _rank_stood(self, rank: Rank, stall: Stall, now: float) -> RankStood:
        stat = system.stat(rank.pid)
        every = stack_dumps.threads(
            stack_dumps.read(stack_dumps.beside(rank.path), (stall.sizes or {}).get(rank.rank, 0))
        )
        others = [
            frame
            for frames in every[:-1]
            if (frame := next((f for f in frames if f.user), frames[0] if frames else None))
        ][:THREADS_LISTED]
        return RankStood(
            at=now,
            rank=rank.rank,
            pid=rank.pid,
            state=stat.state if stat else "",
            cpu=round(self._ranks[rank.rank].cpu, 2),
            frames=every[-1] if every else (),
            threads=tuple(f"{f.function} ({Path(f.file).name}:{f.line})" for f in others),
            thread_frames=tuple(f for f in others if f.user),
            workers=tuple(_workers(rank)),
            attempt=self._attempt,
            phase=rank.ring.phase if rank.ring else -1,
            phase_site=rank.ring.phase_site if rank.ring else -1,
            still_s=round(now - rank.ring.progress_at, 3) if rank.ring else -1.0,
        )


def _release(pids: set[int]) -> None:
    """Continue stopped processes: they would take no SIGTERM, and torchrun waits 30 s for them."""
    for pid in pids:
        stat = system.stat(pid)
        if stat is not None and stat.state == "T":
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)


def waits(ring: Ring | None) -> bool:
    """Whether a rank is inside a call, or inside `init_process_group`."""
    if ring is None:
        return False
    if ring.phase is Phase.INIT:
        return True
    return any(call.inside for call in ring.last_calls)


def deadlocked(finding: Finding) -> bool:
    """Whether a finding proves that the run cannot go on."""
    return finding.deadlocked and finding.confidence is Confidence.PROVEN


def _notice(finding: Finding, waited: float) -> str:
    sure = "proven" if deadlocked(finding) else "suspected"
    return f"no progress for {waited:.0f} s ({sure}): {finding.summary}{finding.elsewhere}"


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _silent(live: list[Rank], stall: Stall) -> list[Rank]:
    """The ranks that have written no stack since they were asked."""
    sizes = stall.sizes or {}
    return [r for r in live if _size(stack_dumps.beside(r.path)) <= sizes.get(r.rank, 0)]


def _signal_for_stack(rank: Rank) -> None:
    """Have faulthandler write the stack of the main thread."""
    path = stack_dumps.beside(rank.path)
    if path and system.catches(rank.pid, STACK_SIGNAL) and system.has_open(rank.pid, path):
        with contextlib.suppress(OSError):
            os.kill(rank.pid, STACK_SIGNAL)


def ask(rank: Rank, question: bytes = ASK_STACKS) -> None:
    """Wake the probe's thread that answers: it writes all stacks and reads torch's flight recorder,
    or what else was asked."""
    if rank.ring is None or not rank.ring.nonce:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.setblocking(False)
        mouth.sendto(question, ask_address(rank.ring.pid, rank.ring.nonce))


def _workers(rank: Rank) -> Iterator[Worker]:
    """The children of a rank; with the stacks of some, where it waits for a batch."""
    loading = rank.ring is not None and rank.ring.phase is Phase.DATA
    for number, pid in enumerate(system.children(rank.pid)[:WORKERS_LISTED]):
        stat = system.stat(pid)
        yield Worker(
            pid=pid,
            state=stat.state if stat else "",
            cpu_s=round(system.cpu_seconds(pid), 2),
            waits_in=system.waits_in(pid),
            frames=_worker_stack(rank, pid) if loading and number < WORKERS_ASKED else (),
        )


def _worker_stack(rank: Rank, pid: int) -> tuple[StackFrame, ...]:
    """The stack of a forked worker, which writes it to the file of its rank; empty if it does not
    answer soon."""
    path = stack_dumps.beside(rank.path)
    if path is None or not (system.catches(pid, STACK_SIGNAL) and system.has_open(pid, path)):
        return ()
    try:
        with path.open("a") as file:
            file.write(stack_dumps.WORKER.format(pid))
        size = last = _size(path)
        try:
            os.kill(pid, STACK_SIGNAL)
            until = time.monotonic() + WORKER_ANSWERS_S
            while time.monotonic() < until:
                time.sleep(0.02)
                now = _size(path)
                if now > size and now == last:
                    break
                last = now
            return stack_dumps.worker(stack_dumps.read(path, size))
        finally:  # also where the worker has just ended: what follows is the rank's
            with path.open("a") as file:
                file.write(stack_dumps.RANK)
    except OSError:
        return ()
