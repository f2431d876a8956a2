"""DDP605."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.divergence.mismatch_report import never_made
from ddpdoctor.analysis.waiting.failures import (
    CLEAN_UP_S,
    Failure,
    at_teardown,
    crash_line,
    failures,
    inside_call,
    spawn_failed,
    step_of,
    unseen,
    vanished,
    whereabouts,
)
from ddpdoctor.analysis.waiting.sent_signals import sent as signal_sent
from ddpdoctor.analysis.waiting.snapshot import scene
from ddpdoctor.analysis.waiting.wait_graph import victims
from ddpdoctor.events import MemoryLimit, NodeSample, RankExiting, RankSample, SpawnEnded
from ddpdoctor.report.findings import Check, Confidence, Evidence, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Rank, Run, ranks_text

GIB = 1 << 30
MEANINGS = {
    "SIGKILL": "killed from outside: by the kernel for lack of memory, a scheduler, or a person",
    "SIGSEGV": "crashed in native code (an extension, a driver, too deep recursion)",
    "SIGABRT": "aborted by native code",
    "SIGBUS": "touched memory that is not there: /dev/shm or a disk is full",
    "SIGTERM": "told to end from outside (a scheduler, a time limit, `kill`)",
    "SIGFPE": "an arithmetic fault in native code",
    "SIGILL": "an instruction that this CPU does not have: a binary built for another one",
    "SIGHUP": "its terminal or session was closed",
    "SIGINT": "interrupted from outside",
}

UNKNOWN = (
    "nobody saw how this process ended, only that the others lost it: it crashed in native code "
    "(an extension, a driver), or was killed from outside (by the kernel for lack of memory, a "
    "scheduler, or a person)"
)
REPORTED = (
    "it wrote down its stacks, as it does at SIGTERM, and ended before those that lost it: told to "
    "end from outside (a scheduler, a time limit, `kill`)"
)
TIME_OVER = 124
"""The status of `timeout`, where the time of the command is over that it started."""


class RankDied(Check):
    """A rank's process was ended by a signal

    ## What it finds
    Ranks that a signal ended, with what the signal means, where they were, and how their memory
    went.

    ## How it knows
    The launcher, or the node's monitor in its place, records how each process ends; Python writes
    down the stack of a crash in native code; of a signal that a rank sends, to itself or to another
    one, the line is on record. The monitor samples memory once a second, and reads the kernel's own
    counter of kills for lack of memory, where that is readable, to confirm one. The finding is
    proven where the signal is known; suspected where nobody saw it, or where
    `torch.multiprocessing.spawn` may have sent it because a process failed that is no rank. Where
    the command of the run ends with the status of `timeout`, all ranks that were left are told
    together.

    ## Why it hurts
    The process leaves no traceback. The other ranks fail with connection errors that look like the
    cause, and torchrun may name one of them.

    ## How to fix it
    Lack of memory: fewer DataLoader workers, load data sets and checkpoints once or memory-mapped,
    smaller batches. A crash in native code: run that line alone, with `python -X faulthandler`.

    ## When it stays quiet
    The launcher's own clean-up kill of the other ranks, also where what failed was no rank and is
    known; a run that somebody stopped, or `timeout` once it stood still; an abort at teardown,
    after the program has ended and in no line of it.
    """

    code = "DDP605"
    name = "rank-died"
    family = "hang"
    severity = Severity.ERROR

    def examine(self, run: Run) -> Iterable[Finding]:
        if spawn_failed(run):
            return  # told by first-failure
        if over := _time_over(run):
            if run.stall is None:  # else what it stood at took the time
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
            return  # it died of another rank's failure
        yield self._report(run, [f for f in died if f.rank.signal == first.rank.signal])

    def explains(self, mine: Finding, other: Finding) -> bool:
        effects = ("rank-missing", "rank-exited-early", "first-failure", "stall", "data-stall",
                   "rendezvous-stall")  # fmt: skip
        return other.check in effects or never_made(other)

    def _report(self, run: Run, died: list[Failure]) -> Finding:
        first = died[0]
        rank, name = first.rank, first.rank.signal
        reported = rank.ended is not None and not rank.ended.silent and run.stall is None
        unnamed = "was told to end" if reported else "ended without a word"
        how = f"died of {name}" if name else unnamed
        ranks = tuple(sorted(f.rank.rank for f in died))
        memory = _memory(run, rank)
        starved = bool(memory.get("oom_kills"))
        sender, sent = signal_sent(run, rank, [rank.ended.signal if rank.ended else None])
        crashed = crash_line(run, rank)
        over = all(f.rank.of(RankExiting) for f in died)
        where = sent or crashed or (None if over else whereabouts(rank))
        step = step_of(first)
        there = bool(crashed) or inside_call(rank)
        placed = "sent at" if sent else "in" if there else "last seen at"
        unseen = _spawned_unseen(run, died)
        now = scene(run)
        rest = [s for s in now.stands.values() if s.rank.rank not in ranks and s.blocked]
        return self.finding(
            ranks=ranks,
            steps=None if step is None else Steps.of([step]),
            confidence=Confidence.PROVEN if name and not unseen else Confidence.SUSPECTED,
            subjects=(name,) if name else (),
            location=where,
            label=f"{ranks_text([sender.rank])} sends it here"
            if sent and sender
            else f"{ranks_text([rank.rank])} {'crashed' if crashed else 'was last seen'} here",
            summary=f"{ranks_text(ranks)} {how}"
            + (" for lack of memory" if starved else "")
            + ("" if step is None else f" at step {step}")
            + (f" as {'they' if len(ranks) > 1 else 'it'} left, after the program" if over else "")
            + (f", {placed} {where}" if where else ""),
            cause="the kernel ended it for lack of memory: its counter of such kills went up"
            if starved
            else _own_signal(rank, sender)
            if sender
            else unseen or (REPORTED if reported and not name else _meaning(name, rank)),
            fix=f"see why {ranks_text([sender.rank])} comes to the line above"
            if sender
            else "look at the end of the output: `torch.multiprocessing.spawn` names there the "
            "process that ended first, and its error"
            if unseen
            else _fix(name, starved, rank, bool(crashed)),
            fix_kind=FixKind.CHECK,
            evidence={**({"signal": name} if name else {}), **memory, **victims(now, rest)},
            at=first.at,
        )

    def _report_time_over(self, reported: list[Failure]) -> Finding:
        rank = reported[0].rank
        where = whereabouts(rank)
        ranks = sorted(f.rank.rank for f in reported)
        return self.finding(
            ranks=tuple(ranks),
            steps=Steps.of([rank.steps]) if rank.steps else None,
            subjects=("SIGTERM",),
            location=where,
            label=f"{ranks_text([rank.rank])} was last seen here",
            summary=f"{ranks_text(ranks)} {'were' if len(ranks) > 1 else 'was'} told to end"
            + (f" at step {rank.steps}" if rank.steps else "")
            + ": the time of their command was over",
            cause=f"the command ended with status {TIME_OVER}, as `timeout` does when it has told "
            "one to end: no rank is at fault",
            fix="give the command more time, or train for fewer steps; a checkpoint now and then "
            "keeps what was done",
            fix_kind=FixKind.CHECK,
            evidence={"status": TIME_OVER},
            at=reported[0].at,
        )


def _time_over(run: Run) -> list[Failure]:
    """All ranks that were still there when `timeout` told their command to end, which then told
    them: nobody saw of each how it ended."""
    found = failures(run)
    killed = [r for r in run.ranks.values() if r.state in ("killed", "hung") and r.ended]
    if run.info.exit_code != TIME_OVER or not killed:
        return []
    if any(f.kind in ("exception", "exit") for f in found):
        return []
    if any(r.signal not in ("SIGTERM", None) for r in killed):
        return []
    reported = [Failure(r, r.wall(r.ended.at), "signal") for r in killed if r.ended]
    reported += [f for f in found if f.kind == "lost"]
    ends = [f.at for f in reported]
    return reported if max(ends) - min(ends) < CLEAN_UP_S else []


def _spawned_unseen(run: Run, died: list[Failure]) -> str:
    """What may have come before, where ranks are told to end that were spawned together with
    processes that are not on record; empty where that is not so, or spawn itself says which was the
    first to end."""
    rank = died[0].rank
    spawned = rank.started.spawned if rank.started else 0
    seen = sum(1 for r in run.ranks.values() if r.node == rank.node and r.started)
    known = {e.pid for node in run.nodes.values() for e in node.of(SpawnEnded)}
    if spawned <= seen or any(f.rank.signal != "SIGTERM" for f in died):
        return ""
    if rank.ended is not None and rank.ended.pid in known:
        return ""
    return (
        f"told to end, most likely by `torch.multiprocessing.spawn`: it started {spawned} "
        f"processes, of which {seen} became {'ranks' if seen > 1 else 'a rank'}, and ends all "
        "of them as soon as one has failed, also one that is not seen here"
    )


def _memory(run: Run, rank: Rank) -> Evidence:
    """How the rank's memory went, and whether the kernel killed for lack of it."""
    reported: Evidence = {}
    for node in run.nodes.values():
        samples = [s for s in node.of(RankSample) if s.rank == rank.rank]
        if samples:
            last = samples[-1]
            reported["memory_first_gib"] = round(samples[0].rss_bytes / GIB, 2)
            reported["memory_last_gib"] = round((last.rss_bytes + last.children_bytes) / GIB, 2)
            left = node.latest(NodeSample)
            reported["node_available_gib"] = round(left.available_bytes / GIB, 2) if left else None
        kills = [m.oom_kills for m in node.of(MemoryLimit) if m.oom_kills is not None]
        if samples and kills and kills[-1] > kills[0]:
            reported["oom_kills"] = kills[-1] - kills[0]
    return reported


def _own_signal(died: Rank, sender: Rank) -> str:
    if sender is died:
        return "the program sent the signal to its own process"
    return f"{ranks_text([sender.rank])} sent the signal"


def _meaning(name: str | None, rank: Rank) -> str:
    if name is None:
        return UNKNOWN
    known = MEANINGS.get(name, f"ended by {name}")
    if name == "SIGABRT" and inside_call(rank):
        return f"{known}; gloo does that when ranks pass different shapes or dtypes"
    return known


def _fix(name: str | None, starved: bool, rank: Rank, crashed: bool) -> str:
    if starved:
        return (
            "use less host memory on that rank: fewer DataLoader workers, data sets loaded once or "
            "memory-mapped, `torch.load(..., mmap=True)`"
        )
    if name is None:
        return (
            "look at what its launcher printed of this rank's end, and at `dmesg`, which tells of "
            "crashes and of kills for lack of memory"
        )
    if name == "SIGKILL":
        return "look at `dmesg` and the scheduler's log for who sent it; watch the memory figures"
    if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
        if not crashed:
            return (
                "look in its output for `Fatal Python error` and the stack below it, or run it "
                "with `python -X faulthandler`"
            )
        stem = rank.path.stem if rank.path else f"rank-{rank.rank}"
        return f"run the line above alone; {stem}.stacks.txt holds the Python stack at the crash"
    return "find out who sent the signal: a time limit, a scheduler, another program"
