"""How ranks failed: on their own, by a signal, or because another rank did."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ...events import (
    CallSite,
    ExceptionRaised,
    Frame,
    GroupDestroyed,
    GroupReady,
    InitEntered,
    ProcessEnded,
    RankExiting,
    RankStood,
    SpawnFailed,
    StepDone,
)
from ...run import Call, Location, Rank, Run, State, shorten, stopped_at, stopped_in
from .thresholds import CLEAN_UP_S, JUST_BEFORE_S, NCCL_TIMEOUT_S, SEEN_S, WATCHED

LOST_PEER = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|recvValue failed|remote worker crashing"
    r"|remote process|peer is (?:dead|gone)|inconsistent 0 params|ncclRemoteError|ncclSystemError"
    r"|failed to recv, got 0 bytes|unexpected EOF|Socket Timeout|DistNetworkError|DistStoreError"
    r"|shut down too early|NCCL communicator was aborted",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(
    r"Timed out waiting|wait timeout|Watchdog caught collective operation timeout|timed out after"
    r"|failed to pass monitoredBarrier|Timeout waiting for|operation timeout|store based barrier"
    r"|The client socket has timed out|Timed out initializing process group"
    r"|Application timeout caused pair closure",
    re.IGNORECASE,
)
EXIT_RAISED = "a `SystemExit`, perhaps raised by a signal handler"
_TORCHS = ("RuntimeError", "torch.distributed.", "torch._C._distributed", "ConnectionError")


@dataclass(frozen=True)
class Failure:
    """How and when one rank failed.

    Attributes:
        at: seconds since the epoch.
        kind: `exception`, `exit` (a non-zero status of its own), `signal`, or `lost`: a consequence
            of the end of another rank.
    """

    rank: Rank
    at: float
    kind: str
    exception: ExceptionRaised | None = None
    status: int | None = None
    site: int = -1

    @property
    def location(self) -> Location | None:
        """The innermost line of the user's code."""
        if self.exception is not None:
            relayed = self.exception.relayed
            if relayed is not None and (found := self._innermost(relayed.frames)):
                return found
            if found := self._innermost(self.exception.frames):
                return found
            named = re.search(r"\(([^(),]+), line (\d+)\)$", self.exception.message)
            if named:
                return Location(shorten(named[1], self.rank.cwd), int(named[2]))
        return self.rank.location(self.site)

    @property
    def while_joining(self) -> bool:
        """Whether torch raised it in `init_process_group`."""
        entered = self.rank.latest(InitEntered)
        if self.exception is None or entered is None or entered.at > self.exception.at:
            return False
        formed = any(entered.at <= e.at for e in self.rank.of(GroupReady))
        return not formed and self.exception.kind.startswith(_TORCHS)

    @property
    def received(self) -> Location | None:
        """The line of the rank at which it received the exception of another process."""
        if self.exception is None or self.exception.relayed is None:
            return None
        return self._innermost(self.exception.frames)

    def _innermost(self, frames: tuple[Frame, ...]) -> Location | None:
        frame = next((f for f in reversed(frames) if f.user), None)
        return self.rank.location_of(frame.file, frame.line) if frame is not None else None

    @property
    def kind_raised(self) -> str:
        """The class of the exception; that of the original where torch re-raised it."""
        if self.exception is None:
            return ""
        return (self.exception.relayed or self.exception).kind

    @property
    def message(self) -> str:
        """The message of the exception, or of the exit."""
        if self.exception is None:
            leaving = self.rank.latest(RankExiting)
            return leaving.message if leaving and self.kind == "exit" else ""
        return (self.exception.relayed or self.exception).message

    @property
    def before(self) -> str:
        """The exception that was being handled when this one was raised: `ValueError: boom
        (train.py:12)`; empty for none."""
        first = self.exception.first if self.exception is not None else None
        if first is None:
            return ""
        spot, lines = self._innermost(first.frames), first.message.strip().splitlines()
        what = f"{first.kind}: {cut(lines[0], 100)}" if lines else first.kind
        return f"{what} ({spot})" if spot else what

    @property
    def worker(self) -> str:
        """The worker process that raised it, `DataLoader worker 0`; empty for none."""
        relayed = self.exception.relayed if self.exception is not None else None
        return relayed.where.replace("worker process", "worker") if relayed is not None else ""

    @property
    def text(self) -> str:
        """`ValueError: boom`, or `exit status 7`."""
        lines = self.message.strip().splitlines()
        what = self.kind_raised if self.exception else f"exit status {self.status}"
        return f"{what}: {cut(lines[0], 200)}" if lines else what

    @property
    def signature(self) -> tuple[object, ...]:
        """What is equal for equal failures of two ranks."""
        if self.exception is not None:
            raised = self.exception.relayed or self.exception
            frames = tuple((f.file, f.line) for f in raised.frames if f.user)
            return raised.kind, frames
        return self.kind, self.status, self.location


def cut(text: str, limit: int) -> str:
    """A text of at most `limit` characters, cut at the end of a word."""
    if len(text) <= limit:
        return text
    head = text[:limit].rpartition(" ")[0] or text[:limit]
    return f"{head.rstrip(' ,;:.')} …"


def cut_to_difference(text: str, other: str, limit: int) -> str:
    """A text of at most `limit` characters that shows where it differs from another text."""
    pairs = enumerate(zip(text, other, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))
    if len(text) <= limit or same < limit // 2:
        return cut(text, limit)
    return f"… {cut(text[text.find(' ', same - limit // 2) + 1 :], limit)}"


def failure(rank: Rank) -> Failure | None:
    """How a rank failed, or None where it did not."""
    raised, ended = rank.exception, rank.ended
    leaving = rank.latest(RankExiting)
    left_at = leaving.at if leaving else ended.at if ended else 0.0
    site = leaving.site if leaving else -1
    if raised is not None:
        at = call_failed(rank, raised) or (left_at if raised.caught else raised.at)
        kind = "lost" if lost_peer(raised) or timed_out(rank) else "exception"
        if raised.kind in ("KeyboardInterrupt", "SystemExit"):
            kind = "lost"
        return Failure(rank, rank.wall(at), kind, raised, rank.exit_code, site)
    if ended is not None and ended.by_launcher:
        return None
    if ended is not None and ended.signal is not None:
        return Failure(rank, rank.wall(ended.at), "signal")
    status = ended.status if ended is not None else leaving.status if leaving else None
    if not status:
        return None
    return Failure(rank, rank.wall(left_at), "exit", None, status, site)


def call_failed(rank: Rank, raised: ExceptionRaised) -> float | None:
    """When the call ended that raised this exception."""
    last = rank.ring.last_calls[-1] if rank.ring and rank.ring.last_calls else None
    if last is None or last.state is not State.FAILED:
        return None
    return last.ended if 0 <= raised.at - last.ended < JUST_BEFORE_S else None


def lost_peer(raised: ExceptionRaised) -> bool:
    """Whether torch raised it because the process of another rank ended, or it follows from such an
    error."""
    return _of_torch(raised, LOST_PEER)


def timed_out(rank: Rank) -> bool:
    """Whether torch ended a rank with a timeout because another rank did not arrive."""
    raised = rank.exception
    return raised is not None and _of_torch(raised, TIMED_OUT)


def _of_torch(raised: ExceptionRaised, says: re.Pattern[str]) -> bool:
    if raised.relayed is not None:  # a worker has no connection to other ranks
        return False
    both = (e for e in (raised, raised.first) if e is not None)
    return any(e.kind.startswith(_TORCHS) and says.search(e.message) for e in both)


def is_over(run: Run, rank: Rank, left: float, now: float) -> bool:
    """Whether a rank that left can change nothing any more: its process is gone for so long that
    the others lost their connections to it, or has been in its teardown for the stall time.

    Args:
        left: when it began to leave; now: both in seconds on the rank's clock.
    """
    if rank.ended is not None:
        return now - rank.ended.at >= CLEAN_UP_S
    return run.stall is not None and now - left >= run.stall[0].hang_after


def left_waiting(run: Run, failed: tuple[int, ...]) -> bool:
    """Whether ranks still wait in a live run, although a rank failed and nobody ends them."""
    if run.now is None or not all(
        is_over(run, rank, leaving.at if leaving else run.now, run.now)
        for rank in (run.ranks[r] for r in failed)
        for leaving in (rank.latest(RankExiting),)
    ):
        return False
    return any(
        rank.rank not in failed
        and rank.ended is None
        and rank.ring is not None
        and run.now - rank.ring.progress_at >= CLEAN_UP_S
        and any(call.inside for call in rank.ring.last_calls)
        for rank in run.ranks.values()
    )


def failures(run: Run) -> list[Failure]:
    """The failures of all ranks, the earliest first; only those before it where somebody stopped
    the run."""
    found = [f for r in run.ranks.values() if (f := failure(r)) is not None]
    found = [replace(f, kind="lost") if ended_by_watchdog(run, f.rank) else f for f in found]
    interrupted = [f for f in found if f.kind_raised == "KeyboardInterrupt"]
    if len(interrupted) < len(run.ranks):  # who stops a run interrupts all of it
        found = [replace(f, kind="exception") if f in interrupted else f for f in found]
    found = [f for f in found if not _cleaned_up(run, f, found)]
    if stopped(run):
        found = _before(found, run)
    return sorted(found, key=lambda f: f.at)


def _before(found: list[Failure], run: Run) -> list[Failure]:
    """The exceptions and exits that a run of which somebody else than ddpdoctor stopped one node,
    or all, had before; where it stood still, before that: a rank may raise, and not end."""
    nodes = run.nodes.values()
    doctor = any((s := stopped_in(node, run.attempt)) and s.by == "doctor" for node in nodes)
    if doctor:
        return []
    times = [at for node in nodes if (at := stopped_at(node, run.attempt)) is not None]
    until = min(times, default=0.0) - SEEN_S
    if run.stall is not None:
        stall, seen = run.stall
        until = min(until, seen - (stall.at - stall.since) + SEEN_S)
    return [
        f
        for f in found
        if f.kind == "exception" and f.kind_raised != "KeyboardInterrupt" and f.at < until
    ]


def unseen(run: Run) -> list[Failure]:
    """The failures of ranks without any record, as the launcher saw them end, the earliest first;
    none where somebody stopped the run."""
    found = []
    for end in (e for node in run.nodes.values() for e in node.of(ProcessEnded)):
        if end.attempt != run.attempt or end.rank not in run.unrecorded or stopped(run):
            continue
        rank = Rank(end.rank)
        rank.ended = end
        if (failed := failure(rank)) is not None:
            found.append(failed)
    return sorted(found, key=lambda f: f.at)


def _cleaned_up(run: Run, ended: Failure, found: list[Failure]) -> bool:
    """Whether a rank was terminated because another process had aborted at its teardown (both may
    be seen at once) or had failed; where nobody saw who sent the signal."""
    if ended.kind != "signal" or ended.rank.signal != "SIGTERM":
        return False
    aborts = [f.at for f in found if at_teardown(run, f)]
    lost = [f.rank.wall(f.rank.ended.at) for f in found if f.kind == "lost" and f.rank.ended]
    return any(-SEEN_S < ended.at - at < CLEAN_UP_S for at in aborts) or any(
        0 < ended.at - at < CLEAN_UP_S for at in lost
    )


def spawn_failed(run: Run) -> tuple[SpawnFailed, list[Failure]] | None:
    """The process that `torch.multiprocessing.spawn` started, which is no rank and raised first,
    and the ranks that spawn terminated because of it; None where that did not happen."""
    reported = [e for node in run.nodes.values() for e in node.of(SpawnFailed)]
    killed = [r for r in run.ranks.values() if r.state == "killed" and r.ended] if reported else []
    ended = [Failure(r, r.wall(r.ended.at), "signal") for r in killed if r.ended]
    if not ended or stopped(run) or any(r.signal not in ("SIGTERM", None) for r in killed):
        return None
    spawned = {r.started.spawned if r.started else 0 for r in killed}
    found = min((e for e in reported if {e.count} == spawned), key=lambda e: e.wall, default=None)
    first = min(f.at for f in ended)
    if found is None or not 0 <= first - found.wall < JUST_BEFORE_S:
        return None
    lost = LOST_PEER.search(found.message) or TIMED_OUT.search(found.message)
    return None if lost and found.kind.startswith(_TORCHS) else (found, ended)


def vanished(run: Run) -> list[Failure]:
    """Ranks that ended without any trace, nobody knows how, while others only lost their peers or
    were terminated.

    A rank that a launcher terminates leaves its stacks, and ends after a rank that lost a peer; one
    that the launcher kills because that did not help ends long after the others.
    """
    found = failures(run)
    if not all(_lost_others(f) or f.rank.signal == "SIGTERM" for f in found):
        return []
    left = {f.rank.rank for f in found}
    ends = [
        r.wall(r.ended.at)
        for r in run.ranks.values()
        if r.ended and not r.ended.silent and (r.rank in left or not r.of(RankExiting))
    ]
    first = min(ends, default=-math.inf)
    losers = [f.rank for f in found if _lost_others(f)]
    before = min((r.wall(r.ended.at) for r in losers if r.ended), default=-math.inf)
    return [
        Failure(r, at, "signal")
        for r in run.ranks.values()
        if r.ended is not None
        and (at := r.wall(r.ended.at)) < (first + CLEAN_UP_S if r.ended.silent else before)
        and (r.ended.silent or _unexplained(r, left))
    ]


def _unexplained(rank: Rank, failed: set[int]) -> bool:
    """Whether nothing on record says how a rank ended."""
    end = rank.ended
    known = end is None or end.by_launcher or end.status is not None or end.signal is not None
    return not known and rank.rank not in failed and not rank.of(RankExiting)


def _lost_others(f: Failure) -> bool:
    return f.exception is not None and (lost_peer(f.exception) or timed_out(f.rank))


def stopped(run: Run) -> bool:
    """Whether the user or ddpdoctor stopped the run, so that how ranks end says nothing."""
    return any(stopped_in(node, run.attempt) for node in run.nodes.values())


def at_teardown(run: Run, found: Failure) -> bool:
    """Whether a process aborted while the interpreter shut down, in no line of the program, as
    torch does occasionally."""
    rank = found.rank
    if found.kind != "signal" or rank.signal not in ("SIGABRT", "SIGSEGV", "SIGBUS"):
        return False
    if not rank.of(RankExiting) or rank.exception is not None or crash_line(run, rank):
        return False
    return rank.steps >= max(r.steps for r in run.ranks.values())


def step_of(failed: Failure) -> int | None:
    """The optimizer step in which a rank failed; None before training, after it (no step after the
    groups were destroyed, or while it left), and for several optimizers in turn."""
    rank, spans = failed.rank, dict[int, tuple[float, float]]()
    for e in rank.of(StepDone):
        spans[e.optimizer] = spans.get(e.optimizer, (e.at, e.at))[0], e.at
    # With an exception the steps of all optimizers together are recorded.
    step = failed.exception.step if failed.exception and len(spans) < 2 else rank.steps
    if step < 0 or not rank.steps:
        return None
    begins, stops = zip(*spans.values(), strict=True) if spans else ((0.0,), (0.0,))
    if max(begins) > min(stops):
        return None
    ends = [e.at for e in rank.of(GroupDestroyed) if not e.name]
    ends += [e.at for e in rank.of(RankExiting)] if failed.kind == "signal" else []
    over = any(max(stops) < at and rank.wall(at) <= failed.at for at in ends)
    return None if over else step


def raised_exit(rank: Rank) -> bool:
    """Whether a `SystemExit` of unknown origin ended a rank."""
    leaving = rank.latest(RankExiting)
    return leaving is not None and (leaving.how, leaving.site) == ("sys.exit", -1)


def is_done(rank: Rank) -> bool:
    """Whether a rank has left, or destroyed its groups."""
    return bool(rank.of(RankExiting)) or destroyed(rank) is not None


def destroyed(rank: Rank, at: float = math.inf) -> GroupDestroyed | None:
    """The call by which a rank destroyed its groups; None where it formed new ones after that, or
    is about to.

    Args:
        at: until when, in seconds on the rank's clock.
    """
    joined = [e.at for kind in (InitEntered, GroupReady) for e in rank.of(kind) if e.at <= at]
    since = max(joined, default=0.0)
    ends = (e for e in rank.of(GroupDestroyed) if not e.name and since <= e.at <= at)
    return min(ends, key=lambda e: e.at, default=None)


def crash_line(run: Run, rank: Rank) -> Location | None:
    """The user's line in which native code crashed, where faulthandler recorded it."""
    seen = (e for node in run.nodes.values() for e in node.of(RankStood))
    own = (e for e in seen if e.crashed and (e.rank, e.attempt) == (rank.rank, run.attempt))
    frame = next((e.user_frame for e in own), None)
    if frame is None:
        return None
    return Location(shorten(frame.file, rank.cwd), frame.line, frame.function, frame.text)


def native_abort(run: Run, rank: Rank) -> bool:
    """Whether a thread without Python aborted the process, as those of backends do."""
    seen = (e for node in run.nodes.values() for e in node.of(RankStood))
    return rank.signal == "SIGABRT" and any(
        e.native and (e.rank, e.attempt) == (rank.rank, run.attempt) for e in seen
    )


def ended_by_watchdog(run: Run, rank: Rank) -> bool:
    """Whether NCCL's watchdog aborted the process after its timeout, because a collective did not
    finish: the rank is the one that waited."""
    entered, ended = rank.latest(InitEntered), rank.ended
    if ended is None or rank.ring is None or "nccl" not in backends(rank):
        return False
    if native_abort(run, rank) and any(
        not e.retired for f in rank.flight_dump() for e in f.entries
    ):
        return True  # torch writes that down before it ends the process
    timeout = entered.timeout_s if entered is not None and entered.timeout_s > 0 else NCCL_TIMEOUT_S
    still = ended.at - rank.ring.progress_at
    return native_abort(run, rank) and still >= WATCHED * timeout


def backends(rank: Rank) -> str:
    """The backends of the groups of a rank: `gloo`, `cpu:gloo,cuda:nccl`."""
    return ",".join(dict.fromkeys(e.backend for e in rank.of(GroupReady) if e.member))


def inside_call(rank: Rank) -> bool:
    """Whether a rank was in a call at its last sign of life."""
    return rank.ring is not None and any(call.inside for call in rank.ring.last_calls)


def whereabouts(rank: Rank) -> Location | None:
    """The last line at which a rank was seen."""
    ring = rank.ring
    calls = ring.last_calls[::-1] if ring is not None else ()
    if found := _line_of(rank, next((c for c in calls if c.inside), None)):
        return found
    if ring is not None and (found := rank.location(ring.phase_site)):
        return found
    step = rank.latest(StepDone)
    if step is not None and (found := rank.location(step.site)):
        return found
    return _line_of(rank, next(iter(calls), None))


def _line_of(rank: Rank, call: Call | None) -> Location | None:
    site = next((s for s in rank.of(CallSite) if call and s.id == call.site), None)
    return rank.location(site.line) if site is not None else None
