"""DDP605."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.analysis.divergence.faults import NEVER_CREATED
from ddpdoctor.analysis.waiting import shared_groups
from ddpdoctor.analysis.waiting.failures import (
    Failure,
    at_teardown,
    backends,
    crash_line,
    destroyed,
    failures,
    inside_call,
    native_abort,
    spawn_failed,
    step_of,
    unseen,
    vanished,
    whereabouts,
)
from ddpdoctor.analysis.waiting.sent_signals import ending
from ddpdoctor.analysis.waiting.shared_groups import shared_group
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, snapshot_of
from ddpdoctor.analysis.waiting.thresholds import CLEAN_UP_S, LINES_SHOWN
from ddpdoctor.analysis.waiting.wait_graph import victims
from ddpdoctor.events import MemoryLimit, NodeSample, RankExiting, RankSample, SpawnEnded
from ddpdoctor.report.declarations import WAITING, Effect
from ddpdoctor.report.findings import (
    Check,
    Confidence,
    Evidence,
    Finding,
    FixKind,
    Related,
    Severity,
    Steps,
)
from ddpdoctor.run import Location, Rank, Run, ranks_text, ranks_were
from ddpdoctor.run.phrases import listed
from ddpdoctor.run.rank import signal_name

GIB = 1 << 30
NATIVE = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE")
"""Signals of errors in native code."""
MEANINGS = {
    "SIGKILL": "killed from outside: by the kernel (out of memory), a scheduler, or a person",
    "SIGSEGV": "crashed in native code (an extension, a driver, too deep recursion)",
    "SIGABRT": "aborted by native code",
    "SIGBUS": "accessed memory that does not exist: /dev/shm or a disk is full",
    "SIGTERM": "terminated from outside (a scheduler, a time limit, `kill`)",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction that this CPU does not have: the binary was built for another one",
    "SIGHUP": "its terminal or session was closed",
    "SIGINT": "interrupted from outside",
}

UNKNOWN = (
    "nothing on record says how this process ended, only that the others lost it: it crashed in "
    "native code (an extension, a driver), or was killed from outside (by the kernel for lack of "
    "memory, a scheduler, or a person)"
)
TERMINATED = (
    "it wrote its stacks, as it does at SIGTERM, and ended before the ranks that lost it: "
    "terminated from outside (a scheduler, a time limit, `kill`)"
)
TIME_OVER = 124
"""The exit status of `timeout` when the time limit of its command is reached."""


@dataclass(frozen=True)
class Siblings:
    """Processes that `torch.multiprocessing.spawn` started: how many, and how many became ranks."""

    spawned: int
    seen: int

    @property
    def cause(self) -> str:
        return (
            f"terminated, most likely by `torch.multiprocessing.spawn`: it started {self.spawned} "
            f"processes, of which {self.seen} became {'ranks' if self.seen > 1 else 'a rank'}, and "
            "terminates all of them as soon as one fails, even one without a record here"
        )


class RankDied(Check):
    """A signal ended the process of a rank

    ## What it finds
    Ranks that a signal ended: what the signal means, where they were, and how their memory grew.
    Where a thread of the communication backend aborted the process, the finding says where the
    other ranks were: the aborted rank is the one that noticed, not always the one at fault.

    ## How it knows
    The launcher, or else the node's monitor, records how each process ends; Python writes the stack
    of a crash in native code; of a signal that a rank sends, to itself or to another one, the line
    is recorded, and tells how a process ended where its record stops there. The monitor samples
    memory once a second and reads the kernel's counter of out-of-memory kills, where it can, to
    confirm one. The finding is proven where the signal is known; suspected where nobody saw it, or
    where `torch.multiprocessing.spawn` may have sent it because a process failed that is no rank.
    Where the command of the run ends with the status of `timeout`, all remaining ranks are reported
    together.

    ## Why it hurts
    The process leaves no traceback. The other ranks fail with connection errors that look like the
    cause, and torchrun may name one of them.

    ## How to fix it
    Out of memory: fewer DataLoader workers, data sets and checkpoints loaded once or memory-mapped,
    smaller batches. A crash in native code: run that line alone with `python -X faulthandler`.

    ## When it stays quiet
    - When the launcher terminates the remaining ranks, also where what failed was no rank and is
      known.
    - When NCCL's watchdog ends ranks after its timeout: they waited, and the finding is about the
      rank that did not come.
    - A run that somebody stopped, or that `timeout` ended after it stood still.
    - An abort at teardown, after the program has ended and in none of its lines.
    """

    code = "DDP605"
    name = "rank-died"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "out-of-memory": "the kernel killed the rank because memory ran out",
        "sent-by-rank": "a rank sent the signal, to itself or to another one",
        "backend-abort": "a thread of the communication backend aborted the process",
        "native-crash": "native code crashed or aborted",
        "killed-outside": "a signal from outside ended the rank",
        "maybe-spawn": "`torch.multiprocessing.spawn` may have sent the signal",
        "unknown-end": "nobody saw how the process ended",
        "time-limit": "`timeout` ended the command of the run",
    }
    effects = (
        Effect((*WAITING, "first-failure", "data-stall", "rendezvous-stall")),
        Effect(("group-creation-mismatch",), rules=(NEVER_CREATED,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        if spawn_failed(run):
            return  # reported by first-failure
        if over := _time_over(run):
            if run.stall is None:  # else the stall used up the time
                yield self._report_time_over(over)
            return
        if silent := vanished(run):
            yield self._report(run, silent)
            return
        found = sorted([*failures(run), *unseen(run)], key=lambda f: f.at)
        died = [f for f in found if f.kind == "signal" and not at_teardown(run, f)]
        if not died:
            return
        first = died[0]
        own = next((f for f in found if f.kind in ("exception", "exit")), None)
        if own is not None and own.at < first.at:
            return  # the failure of another rank led to it
        yield self._report(run, [f for f in died if f.rank.signal == first.rank.signal])

    def _report(self, run: Run, died: list[Failure]) -> Finding:
        first = died[0]
        rank = first.rank
        sender, sent, number, timer = ending(run, rank)
        name = rank.signal or (signal_name(number) if number is not None else None)
        stacks_left = rank.ended is not None and not rank.ended.silent and run.stall is None
        ranks = tuple(sorted(f.rank.rank for f in died))
        unnamed = "terminated" if stacks_left else "ended for an unknown reason"
        if stacks_left:
            unnamed = f"{'was' if len(ranks) == 1 else 'were'} {unnamed}"
        how = f"died of {name}" if name else unnamed
        memory, starved = _memory(run, rank)
        crashed = crash_line(run, rank)
        backend = _aborting_backend(run, rank)
        over = all(f.rank.of(RankExiting) for f in died)
        where = sent or crashed or (None if over else whereabouts(rank))
        step = step_of(first)
        there = bool(crashed) or inside_call(rank)
        placed = (
            "by a timer started at"
            if timer
            else "sent at"
            if sent
            else "in"
            if there
            else "last seen at"
        )
        siblings = _unrecorded_siblings(run, died)
        now = snapshot_of(run)
        rest = [s for s in now.by_rank.values() if s.rank.rank not in ranks and s.blocked]
        rule = _rule(name, starved=starved, sent=sender is not None, spawned=siblings is not None)
        if rule == "native-crash" and backend:
            rule = "backend-abort"
        others = [s for s in now.by_rank.values() if s.rank.rank not in ranks]
        key = next((s.key for s in rest), None)
        shared = shared_group(now, key) if rule == "backend-abort" else None
        return self.finding(
            rule=rule,
            ranks=ranks,
            steps=None if step is None else Steps.of([step]),
            confidence=Confidence.PROVEN if name and siblings is None else Confidence.SUSPECTED,
            subjects=(name,) if name else (),
            location=where,
            label=f"{ranks_text([sender.rank])} "
            + ("starts the timer here" if timer else "sends the signal here")
            if sent and sender
            else f"{ranks_text([rank.rank])} {_was(rule, crashed=bool(crashed))} here",
            related=(
                *_elsewhere(others, where),
                *([Related(f"thread {shared.thread} calls here", shared.line)] if shared else []),
            )
            if rule == "backend-abort"
            else (),
            summary=f"{ranks_text(ranks)} {how}"
            + (" (out of memory)" if starved else "")
            + ("" if step is None else f" at step {step}")
            + (" while exiting, after the program had ended" if over else "")
            + (f", {placed} {where}" if where else ""),
            cause=_of_backend(backend, rank, others, where)
            + (f"; here {shared.cause}" if shared else "")
            if rule == "backend-abort"
            else _cause(rule, rank, sender, siblings, stacks_left=stacks_left, timer=timer),
            fix=shared_groups.FIX
            if shared
            else _fix(rule, rank, sender, crashed=bool(crashed), timer=timer),
            fix_kind=FixKind.CHECK,
            evidence={**({"signal": name} if name else {}), **memory, **victims(now, rest)},
            at=first.at,
        )

    def _report_time_over(self, ended: list[Failure]) -> Finding:
        rank = ended[0].rank
        where = whereabouts(rank)
        ranks = sorted(f.rank.rank for f in ended)
        return self.finding(
            rule="time-limit",
            ranks=tuple(ranks),
            steps=Steps.of([rank.steps]) if rank.steps else None,
            subjects=("SIGTERM",),
            location=where,
            label=f"{ranks_text([rank.rank])} was last seen here",
            summary=f"{ranks_were(ranks)} terminated"
            + (f" at step {rank.steps}" if rank.steps else "")
            + ": the command reached its time limit",
            cause=f"the command ended with status {TIME_OVER}, as `timeout` does when it "
            "terminates one: no rank is at fault",
            fix="raise the time limit, or train for fewer steps; save checkpoints periodically so "
            "that the work is not lost",
            fix_kind=FixKind.CHECK,
            evidence={"status": TIME_OVER},
            at=ended[0].at,
        )


def _rule(name: str | None, *, starved: bool, sent: bool, spawned: bool) -> str:
    """Why a rank died; the kernel's counter proves more than the signal alone."""
    if starved:
        return "out-of-memory"
    if sent:
        return "sent-by-rank"
    if spawned:
        return "maybe-spawn"
    if name is None:
        return "unknown-end"
    return "native-crash" if name in NATIVE else "killed-outside"


def _time_over(run: Run) -> list[Failure]:
    """The ranks that were left when `timeout` terminated their command, which then terminated them;
    empty where that did not happen."""
    found = failures(run)
    killed = [r for r in run.ranks.values() if r.state in ("killed", "hung") and r.ended]
    if run.info.exit_code != TIME_OVER or not killed:
        return []
    if any(f.kind in ("exception", "exit") for f in found):
        return []
    if any(r.signal not in ("SIGTERM", None) for r in killed):
        return []
    ended = [Failure(r, r.wall(r.ended.at), "signal") for r in killed if r.ended]
    ended += [f for f in found if f.kind == "lost"]
    ends = [f.at for f in ended]
    return ended if max(ends) - min(ends) < CLEAN_UP_S else []


def _unrecorded_siblings(run: Run, died: list[Failure]) -> Siblings | None:
    """The processes among which ranks were spawned that may have terminated them: some have no
    record, and spawn does not say which process ended first. None where there are none."""
    rank = died[0].rank
    spawned = rank.started.spawned if rank.started else 0
    seen = sum(1 for r in run.ranks.values() if r.node == rank.node and r.started)
    known = {e.pid for node in run.nodes.values() for e in node.of(SpawnEnded)}
    if spawned <= seen or any(f.rank.signal != "SIGTERM" for f in died):
        return None
    if rank.ended is not None and rank.ended.pid in known:
        return None
    return Siblings(spawned, seen)


def _memory(run: Run, rank: Rank) -> tuple[Evidence, bool]:
    """How the memory of a rank grew, in GiB, and whether the kernel killed for lack of it."""
    found: Evidence = {}
    starved = False
    for node in run.nodes.values():
        samples = [s for s in node.of(RankSample) if s.rank == rank.rank]
        if samples:
            last = samples[-1]
            found["memory_first_gib"] = round(samples[0].rss_bytes / GIB, 2)
            found["memory_last_gib"] = round((last.rss_bytes + last.children_bytes) / GIB, 2)
            left = node.latest(NodeSample)
            found["node_available_gib"] = round(left.available_bytes / GIB, 2) if left else None
        kills = [m.oom_kills for m in node.of(MemoryLimit) if m.oom_kills is not None]
        if samples and kills and kills[-1] > kills[0]:
            found["oom_kills"] = kills[-1] - kills[0]
            starved = True
    return found, starved


def _cause(
    rule: str,
    rank: Rank,
    sender: Rank | None,
    siblings: Siblings | None,
    *,
    stacks_left: bool,
    timer: bool,
) -> str:
    if rule == "out-of-memory":
        return "the kernel killed it because memory ran out: its counter of such kills went up"
    if sender is not None and timer:
        return (
            f"a timer of the program went off, and {rank.signal or 'its signal'} ends a process "
            "that has no handler for it"
        )
    if sender is not None:
        return _own_signal(rank, sender)
    if siblings is not None:
        return siblings.cause
    return TERMINATED if stacks_left and not rank.signal else _meaning(rank.signal, rank)


def _own_signal(died: Rank, sender: Rank) -> str:
    if sender is died:
        return "the program sent the signal to its own process"
    return f"{ranks_text([sender.rank])} sent the signal"


def _aborting_backend(run: Run, rank: Rank) -> str:
    """The backend whose thread aborted the process; empty where none is known to have."""
    known = backends(rank)
    here = native_abort(run, rank) and len(run.ranks) > 1 and not destroyed(rank)
    return next((b for b in ("nccl", "gloo") if b in known), "") if here else ""


def _was(rule: str, *, crashed: bool) -> str:
    if rule == "backend-abort":
        return "was"
    return "crashed" if crashed else "was last seen"


def _elsewhere(others: list[RankSnapshot], where: Location | None) -> tuple[Related, ...]:
    """The lines of ranks that were in other calls."""
    lines = {s.location: s for s in others if s.blocked and s.location not in (None, where)}
    return tuple(
        Related(f"{ranks_text([s.rank.rank])} was {s.doing.partition(' (')[0]} here", spot)
        for spot, s in lines.items()
        if spot is not None
    )[:LINES_SHOWN]


def _of_backend(
    backend: str, rank: Rank, others: list[RankSnapshot], where: Location | None
) -> str:
    """Why a backend aborts a process, and where the others were then."""
    if backend == "nccl":
        return (
            "a thread of NCCL's ended the process: a CUDA error, or a collective that failed, "
            "which its output names; the line is where the program was meanwhile"
        )
    in_calls = [s for s in others if s.blocked and s.location is not None]
    elsewhere = [s for s in in_calls if s.location != where]
    them = listed(sorted({f"{ranks_text([s.rank.rank])} was {s.doing}" for s in elsewhere})[:3])
    why = (
        "gloo aborts the process that receives a message of another size than the call it is in "
        "expects: most likely the ranks make different calls, or pass different shapes or dtypes"
    )
    if elsewhere:
        who = ranks_text([rank.rank])
        return f"{why}; {who} was at {where}, while {them}" if where else f"{why}; {them}"
    if in_calls:
        return f"{why}; all ranks were in the same call"
    return why


def _meaning(name: str | None, rank: Rank) -> str:
    if name is None:
        return UNKNOWN
    known = MEANINGS.get(name, f"ended by {name}")
    if name == "SIGABRT" and inside_call(rank) and "gloo" in backends(rank):
        return f"{known}; gloo aborts when ranks pass different shapes or dtypes"
    return known


def _fix(rule: str, rank: Rank, sender: Rank | None, *, crashed: bool, timer: bool) -> str:
    match rule:
        case "sent-by-rank" if timer:
            return (
                "stop the timer also where the code after it raises (`signal.alarm(0)` in a "
                "`finally`), and handle the signal: `signal.signal(signal.SIGALRM, handler)`"
            )
        case "sent-by-rank" if sender:
            return f"see why {ranks_text([sender.rank])} reaches the line above"
        case "maybe-spawn":
            return (
                "look at the end of the output, where `torch.multiprocessing.spawn` names the "
                "process that ended first, and its error"
            )
        case "out-of-memory":
            return (
                "use less host memory on that rank: fewer DataLoader workers, data sets loaded "
                "once or memory-mapped, checkpoints with `torch.load(..., mmap=True)`"
            )
        case "unknown-end":
            return (
                "see what the launcher printed about the end of this rank, and `dmesg`, which "
                "lists crashes and out-of-memory kills"
            )
        case "backend-abort":
            return (
                "make the same collectives in the same order, with equal shapes and dtypes, on all "
                "ranks: see what leads this rank, or the others, to the line shown"
            )
        case "native-crash" if crashed:
            stem = rank.path.stem if rank.path else f"rank-{rank.rank}"
            return f"run the line above alone; {stem}.stacks.txt has the Python stack of the crash"
        case "native-crash":
            return (
                "look for `Fatal Python error` and the stack below it in its output, or run it "
                "with `python -X faulthandler`"
            )
    if rank.signal == "SIGKILL":
        return (
            "look in `dmesg` and the scheduler's log for who killed it, and check whether memory "
            "ran out"
        )
    return "find out who sent the signal: a time limit, a scheduler, another program"
