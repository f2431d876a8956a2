"""Whether a run stands still, for good or for now: the monitor's part in finding hangs.

It measures (who made no progress since when, where everyone is) and records that; what it means
is said by the checks of the family `hang`, the same that read the folder afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..events import Event, FlightLog, RankExiting, RankStood, StallOver, StallSeen, Worker
from ..report.findings import Check, Confidence, Finding
from ..run import Rank, Run
from ..storage import stack_dumps
from ..storage.call_ring import Phase, Ring, ask_address
from . import system

if TYPE_CHECKING:
    from ..config import Options

STACK_SIGNAL = signal.SIGRTMAX - 3
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Of these faulthandler writes down where they hit the rank."""
QUIET_S = 1.0
"""Nobody is called still before that."""
LEAST_S = 10.0
FIRST_STEP_S = 30.0
"""Before the first step there is nothing to learn from: data sets are read, models compiled."""
BEGUN = 30
"""So many calls count as having begun, where no optimizer steps."""
NOTICED_S = 5.5
"""The checks take it that the end of a process has reached the others after somewhat less."""
PATIENCE = 1.5
"""A pause may be that much longer than the longest one that ended well."""
ANSWERS_WITHIN_S, UNANSWERED_S = 1.0, 0.5
"""Who has not said by then where it stands is sent a signal."""
BUSY = 0.3
"""Share of a core wanted. While every rank computes, none waits for another."""
WHILE_BUSY = 6
LOOK_SHARE = 20
"""A look that took long is not repeated before twenty times that."""


@dataclass
class Still:
    """What is known of one rank's progress.

    Attributes:
        moved_at: what its ring said when last looked at (`Ring.progress_at`); changed: when that
            last changed.
        cpu_s: seconds of a core wanted until `cpu_at`; cpu: the share since the look before.
    """

    moved_at: float = -1.0
    changed: float = 0.0
    cpu_s: float = 0.0
    cpu_at: float = 0.0
    cpu: float = 0.0


@dataclass
class Episode:
    """One time that the run stands still.

    Attributes:
        pids: the ranks' processes then.
        asked: when they were asked for their stacks; sizes: of their stack files before;
            signalled: those who did not answer were sent a signal.
        told: it is on record; noticed: the user was told; proven: it cannot resolve.
        moved: when ranks were first seen to move again.
    """

    since: float
    pids: frozenset[int] = frozenset()
    asked: float = 0.0
    moved: float = 0.0
    sizes: dict[int, int] | None = None
    signalled: bool = False
    told: bool = False
    noticed: bool = False
    proven: bool = False
    judged: tuple[object, ...] = ()
    suspected: tuple[object, ...] = ()


class Standing:
    """Call `look` at every tick.

    Attributes:
        notices: lines for the user that nobody has printed yet.
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
        self._ranks: dict[int, Still] = {}
        self._longest = 0.0
        self._episode: Episode | None = None
        self._attempt = 0
        self._ending = False
        self._next_look = 0.0
        self._stood_once: set[int] = set()

    def news(self) -> list[str]:
        """The notices, to be printed now."""
        told, self.notices = self.notices, []
        return told

    def look(self, run: Run, pids: set[int]) -> str | None:
        """Why the run must be stopped, or None."""
        if self._ending:
            _release(pids)
            return None
        run.now = now = time.monotonic()
        if run.attempt != self._attempt:
            self._attempt, self._episode, self._ranks = run.attempt, None, {}
            self._stood_once = set()
        live = [r for r in run.ranks.values() if r.started and r.started.pid in pids]
        for rank in live:
            self._measure(rank, now)
        since = self._standing_since(run, live, now)
        episode = self._episode
        if since is None or now - since < QUIET_S:
            if episode is not None:
                self._maybe_over(run, live, episode, now)
            return None
        if episode is None or since > episode.since + QUIET_S:
            if episode is not None and not self._maybe_over(run, live, episode, now):
                return None
            episode = self._episode = Episode(since, pids=frozenset(_pids(live)))
        return self._judge(run, live, episode, now)

    def finish(self, run: Run, pids: set[int]) -> None:
        """Where ranks were when they crashed, or were told to end: faulthandler wrote that."""
        seen = {e.rank for n in run.nodes.values() for e in n.of(RankStood)} | self._stood_once
        for rank in run.ranks.values():
            pid = rank.started.pid if rank.started else 0
            if pid not in pids or rank.ended is None:
                continue
            dump = stack_dumps.read(stack_dumps.beside(rank.path))
            frames = stack_dumps.crash(dump) if rank.ended.signal in CRASHES else ()
            crashed = bool(frames)
            if rank.ended.signal == signal.SIGTERM and rank.rank not in seen:
                frames = stack_dumps.main_thread(dump)
            if frames:
                self._write(
                    RankStood(
                        at=rank.ended.at, rank=rank.rank, pid=pid, frames=frames,
                        attempt=run.attempt, crashed=crashed,
                    )
                )  # fmt: skip

    def hang_after(self, run: Run) -> float:
        """Seconds without progress that count as a stall."""
        busy = WHILE_BUSY if all(s.cpu > BUSY for s in self._ranks.values()) else 1
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

    def _measure(self, rank: Rank, now: float) -> None:
        seen = self._ranks.setdefault(rank.rank, Still(changed=now, cpu_at=now))
        moved_at = rank.ring.progress_at if rank.ring else 0.0
        if moved_at != seen.moved_at:
            self._longest = max(self._longest, now - seen.changed if seen.moved_at >= 0 else 0.0)
            seen.moved_at, seen.changed = moved_at, now
        if now - seen.cpu_at >= QUIET_S or not seen.cpu_s:
            used = system.wanted_seconds(rank.started.pid if rank.started else 0)
            if seen.cpu_s and now > seen.cpu_at:
                seen.cpu = max(0.0, used - seen.cpu_s) / (now - seen.cpu_at)
            seen.cpu_s, seen.cpu_at = used, now

    def _standing_since(self, run: Run, live: list[Rank], now: float) -> float | None:
        """Since when a rank waits in a call, or all ranks do nothing; None where none does."""
        if not live:
            return None
        waiting = [self._ranks[r.rank].changed for r in live if waits(r.ring)]
        if waiting:
            return min(waiting)
        begun = [r for r in live if r.ring is not None]
        if len(begun) < len(live):
            return None
        return max(self._ranks[r.rank].changed for r in live)

    def _maybe_over(self, run: Run, live: list[Rank], episode: Episode, now: float) -> bool:
        """Whether the ranks really go on, rather than fail one after the other."""
        failed = any(r.exception or r.latest(RankExiting) for r in run.ranks.values())
        if episode.told:
            episode.moved = episode.moved or now
            if failed or episode.pids - set(_pids(live)) or now - episode.moved < QUIET_S:
                return False
            lasted = now - episode.since
            self._write(StallOver(at=now, lasted_s=lasted, attempt=self._attempt))
            self.notices.append(f"the run goes on, after {lasted:.0f} s")
        self._episode = None
        return True

    def _judge(self, run: Run, live: list[Rank], episode: Episode, now: float) -> str | None:
        limit = self.hang_after(run)
        late = now - episode.since >= limit
        if not episode.asked:
            # Only who may be stuck is asked: a signal may interrupt what a library waits for.
            if not late and not self._suspects(run, live, episode, limit, now):
                return None
            self._ask(live, episode, now)
            return None
        if not episode.told and not self._answered(live, episode, now):
            return None
        state = (late, episode.told, *self._state(run, live, limit, now))
        if state == episode.judged:
            return None
        episode.judged = state
        findings = self._findings(run)
        proof = next((f for f in findings if deadlocked(f)), None)
        if (proof is not None and not episode.proven) or (late and not episode.told):
            episode.told, episode.proven = True, proof is not None
            self._tell(run, live, episode, limit, now)
        reason = self._stop(proof, findings, late)
        if episode.told and not episode.noticed and findings and reason is None:
            # A suspicion rests on what was just written down: it comes with the next look.
            episode.noticed = True
            self.notices.append(_notice(findings[0], now - episode.since))
        return reason

    def _state(self, run: Run, live: list[Rank], limit: float, now: float) -> tuple[object, ...]:
        """What a look depends on: how far every rank is, which of them stand still, and which are
        gone for so long that the others would have noticed."""
        times = QUIET_S, limit + QUIET_S
        seen = [self._ranks[r.rank] for r in live]
        gone = [r.ended.at for r in run.ranks.values() if r.ended]
        return (
            *((s.moved_at, *(now - s.changed >= t for t in times)) for s in seen),
            *(now - at >= NOTICED_S for at in gone),
        )

    def _suspects(
        self, run: Run, live: list[Rank], episode: Episode, limit: float, now: float
    ) -> bool:
        """Whether the records prove a deadlock already; looking takes little of our own time."""
        state = self._state(run, live, limit, now)
        if state == episode.suspected or now < self._next_look:
            return False
        episode.suspected = state
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
            with contextlib.suppress(Exception):  # said by the report, which runs it again
                found += check.examine(run)
        return sorted(found, key=lambda f: (f.confidence is not Confidence.PROVEN, f.code))

    def _ask(self, live: list[Rank], episode: Episode, now: float) -> None:
        episode.asked, episode.signalled = now, False
        episode.sizes = {r.rank: _size(stack_dumps.beside(r.path)) for r in live}
        for rank in live:
            _question(rank)

    def _answered(self, live: list[Rank], episode: Episode, now: float) -> bool:
        silent = _silent(live, episode)
        if silent and not episode.signalled and now - episode.asked >= UNANSWERED_S:
            episode.signalled = True
            for rank in silent:
                _signal(rank)
        if now - episode.asked >= ANSWERS_WITHIN_S:
            return True
        return not silent and all(
            any(log.at >= episode.asked for log in r.of(FlightLog)) for r in live
        )

    def _tell(self, run: Run, live: list[Rank], episode: Episode, limit: float, now: float) -> None:
        """Write down where everybody is, then that the run stands still."""
        if now - episode.asked > 2 * ANSWERS_WITHIN_S:  # where they are now, not then
            self._ask(live, episode, now)
            until = now + ANSWERS_WITHIN_S
            while _silent(live, episode) and (at := time.monotonic()) < until:
                self._answered(live, episode, at)
                time.sleep(0.05)
        for rank in live:
            self._stood_once.add(rank.rank)
            self._write(self._stood(rank, episode, now))
        self._write(
            StallSeen(
                at=now,
                since=episode.since,
                hang_after=limit,
                proven=episode.proven,
                attempt=run.attempt,
            )
        )

    def _stood(self, rank: Rank, episode: Episode, now: float) -> RankStood:
        pid = rank.started.pid if rank.started else 0
        stat = system.stat(pid)
        every = stack_dumps.threads(
            stack_dumps.read(stack_dumps.beside(rank.path), (episode.sizes or {}).get(rank.rank, 0))
        )
        others = tuple(
            f"{frame.function} ({Path(frame.file).name}:{frame.line})"
            for frames in every[:-1]
            if (frame := next((f for f in frames if f.user), frames[0] if frames else None))
        )
        return RankStood(
            at=now,
            rank=rank.rank,
            pid=pid,
            state=stat.state if stat else "",
            cpu=round(self._ranks[rank.rank].cpu, 2),
            frames=every[-1] if every else (),
            threads=others[:20],
            workers=tuple(_worker(child) for child in system.children(pid)[:32]),
            attempt=self._attempt,
            phase=rank.ring.phase if rank.ring else -1,
            phase_site=rank.ring.phase_site if rank.ring else -1,
            still_s=round(now - rank.ring.progress_at, 3) if rank.ring else -1.0,
        )


def _pids(live: list[Rank]) -> list[int]:
    return [r.started.pid for r in live if r.started]


def _release(pids: set[int]) -> None:
    """A stopped process takes no SIGTERM, and torchrun would wait half a minute for it."""
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
    stuck = finding.deadlocked or bool(finding.evidence.get("stuck"))
    return stuck and finding.confidence is Confidence.PROVEN


def _notice(finding: Finding, waited: float) -> str:
    sure = "proven" if deadlocked(finding) else "suspected"
    known = finding.location is None or str(finding.location) in finding.summary
    where = "" if known else f" ({finding.location})"
    return f"no progress for {waited:.0f} s ({sure}): {finding.summary}{where}"


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _silent(live: list[Rank], episode: Episode) -> list[Rank]:
    """Those who have not said where they stand since they were asked."""
    sizes = episode.sizes or {}
    return [r for r in live if _size(stack_dumps.beside(r.path)) <= sizes.get(r.rank, 0)]


def _signal(rank: Rank) -> None:
    """Have faulthandler say where the main thread is."""
    pid, path = rank.started.pid if rank.started else 0, stack_dumps.beside(rank.path)
    if path and system.catches(pid, STACK_SIGNAL) and system.has_open(pid, path):
        with contextlib.suppress(OSError):
            os.kill(pid, STACK_SIGNAL)


def _question(rank: Rank) -> None:
    """Wake the thread that says where every thread is, and reads torch's flight recorder."""
    if rank.ring is None or not rank.ring.nonce:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.setblocking(False)
        mouth.sendto(b"?", ask_address(rank.ring.pid, rank.ring.nonce))


def _worker(pid: int) -> Worker:
    stat = system.stat(pid)
    return Worker(
        pid=pid,
        state=stat.state if stat else "",
        cpu_s=round(system.cpu_seconds(pid), 2),
        waits_in=system.waits_in(pid),
    )
