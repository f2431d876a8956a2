"""DDP701: all ranks wait for the slowest one."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.late_lines import LateLine, late_line
from ddpdoctor.analysis.process.slow_windows import (
    DELAYED,
    WAITED,
    WALL,
    SlowRank,
    lags_in,
    slow_spans,
    windows_of,
)
from ddpdoctor.analysis.process.thresholds import (
    AGREED,
    FEWER_STRETCHES,
    FEWEST_STRETCHES,
    FEWEST_WINDOWS,
    LAG_SHARE,
    LOST_S,
    MOST_LOST,
    PLANNED_SHARE,
)
from ddpdoctor.events import LoaderSeen, Pace, TimeLedger
from ddpdoctor.events.timing import PHASES
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Location, Phase, Rank, Run, counted, ranks_do, ranks_text
from ddpdoctor.run.ledger import (
    CHECKPOINT,
    EVALUATION,
    FORWARD,
    LOADING,
    OPTIMIZER,
    OUTSIDE,
    START,
    Ledger,
    Line,
    ledger_of,
)

SHOWN_S = 0.001
"""Shorter times are not listed in the evidence."""

MOST_SHOWN = 7
"""Accounts listed in the evidence."""


MOST_AT_ONCE = 0.5
"""Share of the time in long stretches from which on one of them is told alone."""


class Straggler(Check):
    """The other ranks wait for one slow rank

    ## What it finds
    Ranks that need longer than the others for their own part of a step, while the others wait: in
    every step, or for long in some of them. The finding names the phase in which the time is lost
    (loading, forward, backward, optimizer, or the code between them), the step since which it is
    so, and what it costs.

    ## How it knows
    Each rank measures its time in every phase, without collectives and without DDP's waits, over
    windows of eight steps (the second to the 24th window, then every second one and later fewer;
    none where steps take less than 5 ms). A rank is slow in a window if

    - its own time, without that in which it had no CPU core, exceeds that of the median rank by
      10 ms and a fifth of a step
    - the other ranks wait longer than this rank, by at least half of that

    It must be slow from some window to the end of the run, in four of five windows, at least four
    windows and a third of all. A rank that was slow for a while only is reported if this lasted for
    an eighth of the run and six windows without a break: a note, or a warning from a third of the
    run on. Windows in which the rank was behind, but perhaps only because it had no core, count
    neither way; the finding gives their number. The finding is proven.

    While other ranks wait, the monitor asks a rank that works, a few times a second, at which line
    it is. Of the lines that most answers have in common the innermost is shown, and the line of the
    training loop that led there. Without these answers (fewer than three, no monitor) the line of
    the phase is shown.

    Ranks that are late in some steps only show in sums. Each rank adds up its time by phase and
    line, and counts the steps with stretches of 50 ms and more. What a rank waits longer in
    collectives than the one that waits least, between any two records of these sums, it waits for
    that one. A rank is reported if the others have waited a fifth of the training time for it, and
    a second at least, and it spent half of that at one line, in long stretches after at least four
    steps (two, if two fifths of the time are lost), that the median rank does not have. In an
    evaluation or in `torch.save`, less than a third is a note.

    ## Why it hurts
    Every step takes as long as on the slowest rank. The steps of the other ranks look equally long,
    with a long backward, but these ranks wait.

    ## How to fix it
    Look for what this rank does in that phase and the others do not. Work that only rank 0 does
    (logging, images, checkpoints) belongs in a thread or in fewer steps. A slow disk or longer
    samples show in loading; a throttled or shared device shows in all phases.

    ## When it stays quiet
    - warm-up and short runs
    - a rank that is late now and then (evaluation, checkpoints, garbage collection), if that does
      not cost a fifth of the run
    - slow steps on changing ranks
    - less than a fifth of a step, or less than 10 ms
    - time in which a rank had no core because of other programs (for the workers of a loader that
      time is not known, so loading is not judged then)
    - ranks that do not wait for each other

    Waits on the GPU (NCCL) and inside reentrant checkpointing are not seen and not judged.
    """

    code = "DDP701"
    name = "straggler"
    family = "performance"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "slow-loading": "the time is lost while a batch is loaded",
        "slow-forward": "the time is lost in the forward",
        "slow-backward": "the time is lost in the backward",
        "slow-optimizer": "the time is lost in the optimizer step",
        "slow-between-phases": "the time is lost in the program's code between the phases",
        "long-stretches": "the time is lost in some steps only, for long in each of them",
    }
    effects = (Effect(("data-bound",), of=("slow-loading",), when=(When.WITHIN_RANKS,)),)

    def unobserved(self, run: Run) -> str | None:
        if any(rank.waits_on_gpu for rank in run.ranks.values()):
            return "ranks wait for each other on the GPU, which the host does not see"
        if (
            len(windows_of(run)) < FEWEST_WINDOWS
            and ledger_of(run.ranks).stretches < FEWEST_WINDOWS
        ):
            return "too few windows of eight steps (5 ms or longer, of one optimizer, on all ranks)"
        return None

    def examine(self, run: Run) -> Iterable[Finding]:
        windows = windows_of(run)
        lags = [lags_in(window) for window in windows]
        slow: dict[int, list[SlowRank]] = defaultdict(list)
        for rank, (first, end) in slow_spans(windows, lags).items():
            found = SlowRank(rank, windows, lags, first, end).as_far_as_known().since_its_phase()
            if not _starved(run.ranks[rank], found):
                slow[found.segment].append(found)
        for segment, ranks in slow.items():
            yield self._report(run, segment, ranks)
        named = {s.rank for ranks in slow.values() for s in ranks}
        if not any(rank.waits_on_gpu for rank in run.ranks.values()):
            yield from self._in_stretches(run, named)

    def _in_stretches(self, run: Run, named: set[int]) -> Iterable[Finding]:
        """Ranks that are late in some steps only; without those that were `named` already."""
        ledger = ledger_of(run.ranks)
        for number in ledger.ranks.keys() - named:
            lost = ledger.lost_for(number)
            if lost < max(LOST_S, LAG_SHARE * ledger.training_s):
                continue
            line, excess = _longest_line(run, ledger, number)
            if line is not None and excess >= AGREED * lost:
                yield self._report_line(run, ledger, line, lost, number)

    def _report_line(
        self, run: Run, ledger: Ledger, line: Line, lost: float, number: int
    ) -> Finding:
        rank = run.ranks[number]
        others = [r for r in ledger.ranks if r != number]
        planned = line.account in (EVALUATION, CHECKPOINT)
        share = lost / ledger.training_s
        each = line.long_s / line.stretches
        # The last ones that fit: start-up and loading matter less here than waiting.
        shown = [a for a in ledger.shown() if a != START][-MOST_SHOWN:]
        outside = line.account == OUTSIDE
        where = "after this line" if outside else _IN[line.account]
        every = round((line.last - line.first) / (line.stretches - 1))
        often = "in nearly every step" if every < 2 else f"about once in {every} steps"
        spends = f"{each * 1e3:.0f} ms"
        stretches = counted(line.stretches, "long stretch", "long stretches")
        told = f"{line.long_s:.1f} s"
        if line.longest_s >= MOST_AT_ONCE * line.long_s and line.stretches > 1:
            often, spends, told = "at once", f"{line.longest_s:.1f} s", f"{line.longest_s:.1f} s"
            stretches = f"one stretch ({line.long_s:.1f} s in {line.stretches})"
        steps = Steps(max(line.first, 0), max(line.last, 0), line.stretches)
        spot = rank.location(line.site)
        takes = f"rank {number} spends {spends} {where} {often}"
        at, label, related = _line_at_fault(late_line(rank, steps), spot, takes)
        return self.finding(
            rule="long-stretches",
            severity=Severity.NOTE if planned and share < PLANNED_SHARE else Severity.WARNING,
            ranks=(number,),
            steps=steps,
            subjects=(line.account,),
            location=at,
            label=label,
            related=tuple(related),
            summary=f"{ranks_do(others, 'wait')} {lost:.1f} of {ledger.training_s:.1f} s for rank "
            f"{number}, which spends {told} "
            + ("outside of the training step" if outside else _IN[line.account])
            + f", in {stretches}",
            cause=f"rank {number} takes {spends} {often}, "
            f"{'after' if outside else 'at'} {spot or 'a line unknown'}; the others do not, and "
            "wait in their next collective",
            fix=_LINE_FIXES.get(line.account, _MOVE_WORK),
            evidence={
                "seconds": [
                    {"rank": r.rank, **{a: round(r.accounts[a], 1) for a in shown}}
                    for r in ledger.ranks.values()
                ],
                "long stretches at this line": line.stretches,
                "seconds in these": round(line.long_s, 2),
                "seconds lost by each other rank": round(lost, 1),
            },
            at=rank.wall(rank.of(TimeLedger)[0].at),
        )

    def _report(self, run: Run, segment: int, slow: list[SlowRank]) -> Finding:
        worst = max(slow, key=lambda s: s.lag_s)
        rank = run.ranks[worst.rank]
        ranks = tuple(s.rank for s in slow)
        pace = worst.windows[-1][worst.rank]
        first = worst.windows[0][worst.rank]
        phase, words = _PHASES[segment]
        between = segment >= len(PHASES)
        begun = first.step - first.count + 1
        others = [r for r in worst.windows[0] if r not in ranks]
        waits_s = statistics.median(worst.median(r, WAITED) for r in others) - worst.median(
            worst.rank, WAITED
        )
        each = f"each of steps {begun}-{pace.step}" if worst.over else "each step"
        span = "a step" if worst.doubts else each
        spot = rank.location(pace.sites[segment % len(PHASES)])
        phase_now = Phase.USER if between else _PHASES_ASKED[segment]
        more = f"rank {worst.rank} spends {worst.excess_s[segment] * 1e3:.0f} ms more per step " + (
            f"{'after this line' if between else 'here'} than {ranks_text(others)}"
        )
        seen = late_line(rank, worst.steps, phase_now)
        at, label, related = _line_at_fault(seen, spot, more)
        return self.finding(
            rule="slow-between-phases" if between else f"slow-{phase}",
            severity=Severity.NOTE if all(s.passing for s in slow) else Severity.WARNING,
            ranks=ranks,
            steps=worst.steps,
            subjects=(phase,),
            location=at,
            label=label,
            related=(*related, *_related(rank, pace, segment)),
            summary=f"{ranks_do(others, 'wait')} {waits_s * 1e3:.0f} of "
            f"{worst.median(worst.rank, WALL) * 1e3:.0f} ms in {span} for {ranks_text(ranks)}, "
            f"which {'is' if len(ranks) == 1 else 'are'} slower {words}",
            cause=_cause(worst, segment, words),
            fix=_MOVE_WORK if between else _FIXES[phase],
            evidence={
                "phase": phase,
                "a step, ms": [
                    {"rank": r, **{name: round(s * 1e3, 1) for name, s in parts.items()}}
                    for r, parts in _parts(worst).items()
                ],
                "windows examined": worst.end - worst.first,
                "windows in which this rank is slow": len(worst.slow),
                **({"windows in doubt (no CPU core)": worst.doubts} if worst.doubts else {}),
                "seconds lost by each other rank": round(waits_s * worst.lasted, 1),
            },
            at=rank.wall(first.at),
        )


def _line_at_fault(
    seen: LateLine | None, phase: Location | None, label: str
) -> tuple[Location | None, str, list[Related]]:
    """As `LateLine.at_fault`; the line of the phase where the rank was not looked at."""
    return seen.at_fault(phase, label) if seen is not None else (phase, label, [])


def _starved(rank: Rank, slow: SlowRank) -> bool:
    """Whether a slow rank waits for the workers of its loader while the ranks lack cores: then the
    workers lack cores too, for a time that is not known."""
    if slow.segment != 0:
        return False
    loops = {window[rank.rank].sites[0] for window in slow.windows}
    helped = any(e.workers and e.loop_site in loops for e in rank.of(LoaderSeen))
    return (
        helped and max(slow.median(r, DELAYED) for r in slow.windows[0]) >= LAG_SHARE * slow.lag_s
    )


def _longest_line(run: Run, ledger: Ledger, number: int) -> tuple[Line | None, float]:
    """The line at which a rank spends most in long stretches beyond the median rank, and how many
    seconds that is; None for fewer stretches than a check goes by."""

    def place(rank: int, line: Line) -> tuple[str, Location | None]:
        return line.account, run.ranks[rank].location(line.site)

    spent = {
        rank: {place(rank, line): line.own_s for line in time.lines}
        for rank, time in ledger.ranks.items()
    }
    most = ledger.lost_for(number) >= MOST_LOST * ledger.training_s
    least = FEWER_STRETCHES if most else FEWEST_STRETCHES
    longest: tuple[Line | None, float] = (None, 0.0)
    for line in ledger.ranks[number].lines:
        if line.account == START or line.stretches < least:
            continue
        at = place(number, line)
        # Others may spend as long there, in short stretches: in every step, say.
        usual = statistics.median_low(s.get(at, 0.0) for s in spent.values())
        excess = min(line.long_s, line.own_s - usual)
        longest = max(longest, (line, excess), key=lambda found: found[1])
    return longest


def _related(rank: Rank, pace: Pace, segment: int) -> tuple[Related, ...]:
    here = segment % len(PHASES)
    if segment == 0:
        made = next((e.site for e in rank.of(LoaderSeen) if e.loop_site == pace.sites[0]), -1)
        place, label = rank.location(made), "the loader is created here"
    elif segment < len(PHASES):
        return ()
    else:
        following = [*pace.sites[here + 1 :], *pace.sites[: here + 1]]
        place = rank.location(next((s for s in following if s >= 0), -1))
        label = "before this line"
    return (Related(label, place),) if place else ()


def _parts(slow: SlowRank) -> dict[int, dict[str, float]]:
    """By rank, the seconds of a step, of waiting in it, and of each segment, the longest first."""
    ranks = list(slow.windows[0])
    longest = sorted(range(len(_PHASES)), key=lambda i: slow.usual(slow.rank, i), reverse=True)
    shown = [i for i in longest if any(slow.usual(r, i) >= SHOWN_S for r in ranks)]
    held = any(slow.median(r, DELAYED) >= SHOWN_S for r in ranks)
    return {
        r: {
            "step": slow.median(r, WALL),
            "waiting": slow.median(r, WAITED),
            **{_PHASES[i][0]: slow.usual(r, i) for i in shown},
            **({"without a CPU core": slow.median(r, DELAYED)} if held else {}),
        }
        for r in ranks
    }


def _cause(slow: SlowRank, segment: int, words: str) -> str:
    excess = slow.excess_s
    usual = slow.usual(slow.rank, segment)
    others = "the others" if len(slow.windows[0]) > 2 else "the other"
    reported = (
        f"rank {slow.rank} spends {usual * 1e3:.0f} ms {words}, {others} "
        f"{(usual - excess[segment]) * 1e3:.0f} ms, {_when(slow)}"
    )
    if excess[segment] < 0.5 * slow.lag_s:
        reported += "; the rest of its delay is in other phases: the rank is slower in general"
    if (delayed := slow.median(slow.rank, DELAYED)) >= LAG_SHARE * slow.lag_s:
        reported += (
            f"; the machine lacks cores: for {delayed * 1e3:.0f} ms of a step rank {slow.rank} was "
            "ready, but something else ran on its core; without that it would still be about "
            f"{slow.lag_s * 1e3:.0f} ms behind"
        )
    return reported


def _when(slow: SlowRank) -> str:
    """Since which step the rank is slow, and until which one if it became normal again."""
    first, last = slow.windows[0][slow.rank], slow.windows[-1][slow.rank]
    since, reported = first.step - first.count + 1, "since the beginning of the run"
    if since > first.count:
        seen = slow.every[slow.first - 1][slow.rank].step if slow.first else -1
        reported = f"since {_either(seen + 1, since)}"
    if slow.over:
        after = slow.every[slow.end][slow.rank]
        reported += f", until {_either(last.step, after.step - after.count)}"
    if slow.doubts:
        reported += (
            f"; {slow.doubts} of {counted(slow.end - slow.first, 'window')} of steps are in doubt, "
            "since ranks had no core for part of them"
        )
    return reported


def _either(first: int, last: int) -> str:
    return f"a step between {first} and {last}" if first < last else f"step {last}"


_PHASES = (
    ("loading", "in loading"),
    ("forward", "in the forward"),
    ("backward", "in the backward"),
    ("optimizer", "in the optimizer step"),
    ("after loading", "between a batch and the forward"),
    ("after forward", "between forward and backward"),
    ("after backward", "between the backward and the optimizer step"),
    ("between steps", "between steps"),
)
"""By segment of the step: a name, and where the time goes. First the phases, then the code after
each of them."""

_PHASES_ASKED = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""The phases of a step, as a rank's looks name them."""

_IN = {
    LOADING: "in loading",
    FORWARD: "in the forward",
    OPTIMIZER: "in the optimizer step",
    EVALUATION: "in an evaluation",
    CHECKPOINT: "in torch.save",
}
"""By account of the ledger, where the time goes."""

_MOVE_WORK = "do this work less often, in a thread, or split it among the ranks"
_FIXES = {
    "loading": "check what this rank reads and from where (longer samples, a slower disk, fewer "
    "workers); `DataLoader(..., num_workers=4)` overlaps loading with the step",
    "forward": "give all ranks the same work per batch; check for a busy or throttled device",
    "backward": "give all ranks the same work per batch; check for hooks that only this rank has, "
    "and for a busy or throttled device",
    "optimizer": "check what this rank does in the optimizer step that the others do not",
}
_LINE_FIXES = {
    LOADING: _FIXES["loading"],
    FORWARD: _FIXES["forward"],
    OPTIMIZER: _FIXES["optimizer"],
    EVALUATION: "split the evaluation among the ranks (a `DistributedSampler` and an `all_reduce` "
    "of the sums), or evaluate less often",
    CHECKPOINT: "save less often, or from a copy in a thread (`torch.distributed.checkpoint."
    "async_save`)",
}
