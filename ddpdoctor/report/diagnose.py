"""Runs the checks over a run and joins what they say into a report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from .._version import __version__
from ..events import (
    Event,
    MemorySample,
    OptimizerSeen,
    ProbeCost,
    ProcessEnded,
    RankExiting,
    RankStarted,
    SignalSent,
    StepDone,
)
from ..events.process import CLOSE_STEPS
from ..run import (
    Rank,
    Run,
    fold_numbers,
    fold_ranks,
    stopped_in,
    told_of,
    with_folded,
)
from ..run.last_activity import interrupted, whereabouts
from ..run.ledger import ledger_of
from ..run.rank import signal_name
from ..run.steps import reported_steps
from .coverage import lost, unobserved
from .environment import describe
from .findings import (
    FINDINGS_SCHEMA,
    Check,
    Confidence,
    Consequence,
    Coverage,
    Finding,
    Overhead,
    RankState,
    Report,
    RunSummary,
    Severity,
    Skipped,
    Table,
    Tool,
)
from .merging import each_once
from .reasons import with_differences
from .suppression import by_comment
from .time_tables import time_lost, time_rows, time_tables

UNKNOWN = "unknown"
"""Of a run that was not examined."""

SHORTEST_LATER_S = 2.0
"""Shorter than this the time after the first steps says nothing about a long run."""


def diagnose(
    run: Run, checks: Sequence[Check], *, folder: str = "", others: Sequence[Check] = ()
) -> Report:
    """Examine a run. The same call serves a live run and a folder from last year.

    Args:
        others: checks that were not selected; what they find is used only as the cause of what
            the selected ones found.
    """
    with told_of(run.folds):
        report = _diagnosed(run, checks, folder, others)
        return msgspec.structs.replace(
            report, findings=tuple(_of_everyone(f) for f in report.findings)
        )


def _of_everyone(finding: Finding) -> Finding:
    """The finding, also about ranks that did what all it names did."""
    every = with_folded(finding.ranks)
    if len(every) == len({*finding.ranks}):
        return finding
    return msgspec.structs.replace(finding, ranks=tuple(sorted(every)))


def _diagnosed(run: Run, checks: Sequence[Check], folder: str, others: Sequence[Check]) -> Report:
    findings: list[Finding] = []
    examined: list[str] = []
    skipped: list[Skipped] = []
    partly: list[Skipped] = []
    tables: list[Table] = []
    makers: dict[str, Check] = {check.name: check for check in checks}
    for check in checks:
        try:
            reason = check.unobserved(run) or run.not_observed(check.name)
            found = [] if reason else list(check.examine(run))
            tables += [] if reason else check.tables(run)
            parts = (check.left_out(run), run.partly_observed(check.name))
            part = None if reason else "; ".join(filter(None, parts))
        except Exception as error:  # a broken check must not hide what the others found
            skipped.append(Skipped(check.name, f"the check itself failed: {error!r}"))
            findings.append(_about_itself(check, error))
            continue
        if reason:
            skipped.append(Skipped(check.name, reason))
        else:
            examined.append(check.name)
            partly += [Skipped(check.name, part)] if part else []
            findings += found
    findings = fold(each_once(findings), makers)
    findings = _explained(findings, makers, run, others) if findings else []
    findings = _with_totals(run, findings)
    findings = with_differences(run, findings, {c.name: c.family for c in checks})
    findings.sort(key=lambda f: (f.severity.rank, f.at, f.code))
    findings, suppressed = by_comment(findings, checks)
    ledger = ledger_of(run.ranks)
    return Report(
        schema_version=FINDINGS_SCHEMA,
        tool=Tool("ddpdoctor", __version__),
        run=_summary(run, folder),
        ranks=tuple(rows(run)),
        findings=tuple(findings),
        overhead=_overhead(run),
        coverage=Coverage(
            examined=tuple(examined),
            skipped=tuple(skipped),
            partly=tuple(partly),
            lost=tuple(lost(run)),
            unobserved=tuple(unobserved(run)),
        ),
        tables=(*tables, *time_tables(ledger), *_folded(run)),
        ledger=time_rows(ledger),
        lost=time_lost(ledger),
        suppressed=tuple(suppressed),
    )


def _folded(run: Run) -> Iterator[Table]:
    """Which ranks were examined for which."""
    if run.folds:
        rows = ((fold_ranks(fold.kept), fold_numbers(fold.kept)) for fold in run.folds)
        title = f"Ranks that did the same ({len(run.folded)} of {len(run.everyone)} not read whole)"
        yield Table(title=title, columns=("ranks", "read whole"), rows=tuple(rows))


def fold(findings: list[Finding], makers: dict[str, Check]) -> list[Finding]:
    """Put every finding that another one explains under the root of that explanation.

    A finding whose consequence ended the run (an error of the family hang) becomes an error.
    """
    because: dict[int, int] = {}
    for i, cause in enumerate(findings):
        maker = makers.get(cause.check)
        for j, effect in enumerate(findings):
            # The first explanation wins; two that explain each other must not both vanish.
            if maker is None or j in because or _root(i, because) == j:
                continue
            if maker.explains(cause, effect):
                because[j] = i
    effects: dict[int, list[Finding]] = {i: [] for i in range(len(findings))}
    for j in sorted(because):
        effects[_root(j, because)].append(findings[j])
    ends = {name for name, check in makers.items() if check.family == "hang"}
    return [
        _with_consequences(finding, effects[i], ends)
        for i, finding in enumerate(findings)
        if i not in because
    ]


def _explained(
    findings: list[Finding], makers: dict[str, Check], run: Run, others: Sequence[Check]
) -> list[Finding]:
    """The findings; where a check that was not selected explains one, with its cause and fix."""
    causes: list[tuple[Check, Finding]] = []
    for check in others:
        with contextlib.suppress(Exception):  # nobody asked for it
            if not (check.unobserved(run) or run.not_observed(check.name)):
                causes += [(check, found) for found in check.examine(run)]
    explained = []
    for f in findings:
        mine = makers.get(f.check)
        rest = ((check, c) for check, c in causes if not (mine and mine.explains(f, c)))
        by = next((c for check, c in rest if check.explains(c, f)), None)
        if by is not None:
            cause = (
                f"this follows from {by.check} ({by.code}), which --select or --ignore excludes: "
            )
            cause += by.summary + (f" ({by.location})" if by.location else "")
            f = msgspec.structs.replace(f, cause=cause, fix=by.fix, fix_kind=by.fix_kind)
        explained.append(f)
    return explained


def _root(i: int, because: dict[int, int]) -> int:
    while i in because:
        i = because[i]
    return i


def _with_consequences(finding: Finding, effects: list[Finding], ends: set[str]) -> Finding:
    if not effects:
        return finding
    consequences = (Consequence(e.code, e.check, e.summary) for e in effects)
    ended = any(e.check in ends and e.severity is Severity.ERROR for e in effects)
    return msgspec.structs.replace(
        finding,
        severity=Severity.ERROR if ended else finding.severity,
        consequences=(*finding.consequences, *consequences),
    )


def _with_totals(run: Run, findings: list[Finding]) -> list[Finding]:
    """With all steps that the optimizers of each took, or all optimizers where it is not known
    whose it is; without, where one took more than another."""
    ranks = run.ranks.values()
    taken: dict[int, int] = {}
    for rank in ranks:
        seen = {e.optimizer for e in rank.of(OptimizerSeen)}
        for n in seen | {e.optimizer for e in rank.of(StepDone)}:
            taken[n] = max(taken.get(n, 0), rank.steps_of(n))
    in_turn = any(reported_steps(r) > r.steps for r in ranks)
    adjusted = []
    for finding in findings:
        totals = {taken.get(n, 0) for n in finding.optimizers or taken}
        mixed = len(totals) > 1 or (in_turn and not finding.optimizers)
        if finding.steps is not None:
            total = None if mixed else max(totals, default=0)
            steps = msgspec.structs.replace(finding.steps, total=total)
            finding = msgspec.structs.replace(finding, steps=steps)
        adjusted.append(finding)
    return adjusted


def _about_itself(check: Check, error: Exception) -> Finding:
    return Finding(
        code="DDP001",
        check="check-failed",
        severity=Severity.NOTE,
        confidence=Confidence.PROVEN,
        subjects=(check.name,),
        summary=f"the check {check.name} failed and says nothing about this run",
        cause=f"a defect in the check, not in your program: {error!r}",
        fix=f"report it with this run folder; until then leave it out with --ignore {check.name}",
        evidence={"error": repr(error)},
    )


def _summary(run: Run, folder: str) -> RunSummary:
    info = run.info
    return RunSummary(
        id=info.id,
        command=tuple(info.command),
        started_at=info.started_at or UNKNOWN * run.left_behind,
        ended_at=info.ended_at,
        world_size=run.world_size,
        outcome=run.outcome(),
        exit_code=info.exit_code,
        torch=run.torch or UNKNOWN * run.left_behind,
        backend=run.backend or UNKNOWN * run.left_behind,
        folder=folder,
        stopped_by=_stopped_by(run),
        machine=describe(run),
    )


def _stopped_by(run: Run) -> str:
    """Who stopped the run, where that is why it ended."""
    if run.outcome() not in ("killed", "hung"):
        return ""
    stops = [(n, s) for n, node in run.nodes.items() if (s := stopped_in(node, run.attempt))]
    if not stops:
        return ""
    number, first = min(stops, key=lambda s: s[1].by == "launcher")
    by = {"interrupt": "Ctrl-C", "doctor": "the doctor"}
    who = by.get(first.by, first.reason or "a signal to ddpdoctor")
    return f"{who} (node {number})" if first.by == "launcher" and len(run.nodes) > 1 else who


def rows(run: Run) -> Iterator[RankState]:
    """A row for each rank; of one that is folded, that of a rank that did the same."""
    made = {number: row(rank, whereabouts(run, rank)) for number, rank in run.ranks.items()}
    for fold in run.folds:
        model = made[min(fold.kept)]
        for number in fold.others:
            if (started := run.folded[number].started) is not None:
                made[number] = msgspec.structs.replace(
                    model,
                    rank=number,
                    node=started.node,
                    local_rank=started.local_rank,
                    pid=started.pid,
                    step_time_s=None,
                    waiting_in_step_s=None,
                    host_memory_peak_bytes=None,
                    device_memory_peak_bytes=None,
                )
    unexamined = run.left_behind
    for number in sorted(made):
        yield _only_known(made[number], run) if unexamined else made[number]


def _only_known(row: RankState, run: Run) -> RankState:
    """The row of a rank that the doctor did not examine: what no file says is left open."""
    ends = (e for node in run.nodes.values() for e in node.of(ProcessEnded) if e.rank == row.rank)
    ended = next((e for e in ends if not e.silent), None)  # as its launcher listed it
    state = "hung" if run.outcome() == "hung" else "lost"
    number = ended.signal if ended else None
    return msgspec.structs.replace(
        row,
        local_rank=None,
        pid=None,
        device=UNKNOWN,
        state=state if ended is None and row.state != "failed" else row.state,
        exit_code=ended.status if ended else None,
        signal=row.signal if number is None else signal_name(number),
        steps=row.steps or None,
    )


def row(rank: Rank, stood: str = "") -> RankState:
    """How a rank ended, or where it is."""
    started = rank.started
    steps = reported_steps(rank)
    return RankState(
        rank=rank.rank,
        node=rank.node,
        local_rank=started.local_rank if started else -1,
        pid=known.pid if (known := started or rank.ended) else 0,
        device=rank.device,
        state=rank.state,
        exit_code=rank.exit_code,
        signal=rank.signal,
        steps=steps,
        step_time_s=rank.step_time(),
        waiting_in_step_s=rank.waiting(),
        host_memory_peak_bytes=_most(e.peak_rss_bytes for e in rank.of(MemorySample)),
        device_memory_peak_bytes=_most(e.device_peak_bytes for e in rank.of(MemorySample)),
        last=stood or _last_thing(rank),
        stood=stood,
        in_turn=steps > rank.steps,
    )


def _most(sizes: Iterable[int]) -> int | None:
    return max(sizes, default=0) or None


def last_thing(run: Run, rank: Rank) -> str:
    """Where a rank stood when something ended it, or else what it did last."""
    return whereabouts(run, rank) or _last_thing(rank)


def _last_thing(rank: Rank) -> str:
    """What this rank did last, in words; a signal to another process is none: torch ends the
    workers of a loader with one."""
    if line := interrupted(rank):
        return f"interrupted at {line}"
    raised = rank.exception
    if raised is not None and not raised.caught:
        return raised.describe()  # what follows it is no news
    skipped = RankExiting if raised else ()

    def counts(event: Event) -> bool:
        to_others = isinstance(event, SignalSent) and event.pid != rank.pid
        return not to_others and not isinstance(event, skipped)

    last = rank.last_of(counts)
    step = rank.latest(StepDone)
    if step and (last is None or step.at > last.at):
        place = rank.location(step.site)
        return f"step {max(step.step, rank.steps - 1)}{f' at {place}' if place else ''}"
    if isinstance(last, RankExiting) and last.status is None and rank.exit_code:
        return f"leaving (status {rank.exit_code})"  # by a `SystemExit` that nobody saw
    if isinstance(last, RankStarted):  # its own words hold the rank: equal ranks would differ
        return "started"
    return last.describe() if last else ""


def _overhead(run: Run) -> Overhead:
    """What the doctor took, in the rank in which that is the largest share of the time."""
    budget = run.info.budget_percent
    costs = [c for rank in run.ranks.values() if (c := _whole_cost(rank))]
    if not costs:
        return Overhead(budget_percent=budget)
    most = max(costs, key=_share)
    later = [c for rank in run.ranks.values() if (c := _later_cost(rank))]
    return Overhead(
        budget_percent=budget,
        measured_percent=round(_share(most), 3),
        later_percent=round(max(map(_share, later)), 3) if later else None,
        own_s=round(most.own_s, 6),
        wall_s=round(most.wall_s, 6),
        start_s=round(most.start_s, 6),
        device_s=round(most.device_s, 6) or None,
    )


def _share(cost: ProbeCost) -> float:
    """In percent."""
    return 100 * cost.own_s / cost.wall_s


def _whole_cost(rank: Rank) -> ProbeCost | None:
    """What it took until the rank ended, or said so last."""
    cost = rank.latest(ProbeCost)
    if cost is None:
        return None
    wall_s = cost.wall_s
    if not cost.steps and len(rank.of(ProbeCost)) == 1:  # nothing went on record since
        wall_s += max(_end(rank) - cost.at, 0.0)
    return msgspec.structs.replace(cost, wall_s=max(wall_s, cost.own_s)) if wall_s > 0 else None


def _end(rank: Rank) -> float:
    """When its process ended, or what it recorded last."""
    ended = rank.ended.at if rank.ended else 0.0
    return max(ended, *(e.at for e in rank))


def _later_cost(rank: Rank) -> ProbeCost | None:
    """What it took after the first steps, None where that was too short to tell."""
    costs = [c for c in rank.of(ProbeCost) if c.steps > CLOSE_STEPS]
    if not costs or costs[-1].wall_s - costs[0].wall_s < SHORTEST_LATER_S:
        return None
    own_s, wall_s = (costs[-1].own_s - costs[0].own_s, costs[-1].wall_s - costs[0].wall_s)
    return ProbeCost(at=costs[-1].at, own_s=own_s, wall_s=wall_s)
