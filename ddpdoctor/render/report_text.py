"""The sentences and tables of a report as plain lines and rows, for every output format."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field

from ..events.process import CLOSE_STEPS
from ..report.findings import (
    Confidence,
    Finding,
    Overhead,
    RankState,
    Report,
    Severity,
    Skipped,
    Steps,
)
from ..run import counted, fold_ranks, ranks_text, ranks_were
from .safe_text import between, clean, columns, duration, figure, some, title

FOLD_ABOVE = 16
"""Worlds larger than this have equal ranks folded into one row."""

ROWS_LIMIT = 40
REASONS_LIMIT = 4
NAMED_CHECKS = 1
PLACES = 4
SHORT_RUN_S = 10.0
EVIDENCE_ROWS = 12
RANK_COLUMNS = ("rank", "state", "steps", "step time", "last activity")


@dataclass(frozen=True)
class Grid:
    """A table ready to print; `more` rows were left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    title: str = ""


@dataclass(frozen=True)
class Proof:
    """One entry of a finding's evidence: a line, a block of lines, or a table."""

    name: str
    line: str = ""
    block: str = ""
    grid: Grid | None = field(default=None)


def headline(report: Report) -> list[str]:
    """What was run and how it ended."""
    run = report.run
    command = clean(shlex.join(run.command), 200) or "(command not on record)"
    facts = [counted(run.world_size, "rank")]
    if run.torch not in ("", "unknown"):
        facts.append(f"torch {clean(run.torch, 40)}")
    if run.backend not in ("", "unknown"):
        facts.append(clean(run.backend, 40))
    first = f"{report.tool.name} {report.tool.version}: {command}"
    lines = [first, f"{ending(report)}{_after(report)}: {', '.join(facts)}"]
    lines += [f"before: {clean(line, 120)}" for line in run.earlier]
    if run.folder:
        lines.append(f"records: {clean(run.folder)}")
    return lines


def machines(report: Report) -> list[str]:
    """What it ran on."""
    return [clean(line) for line in report.run.machine]


def _after(report: Report) -> str:
    """` after 5 s`; nothing where the times on record do not say it. They are of whole seconds."""
    took = between(report.run.started_at, report.run.ended_at)
    if took is None or took < 0:
        return ""
    return f" after {duration(took)}" if took >= 1 else " after less than 1 s"


def ending(report: Report) -> str:
    run = report.run
    if run.outcome == "incomplete":
        return "still running" if _running(report) else "incomplete (no end on record)"
    code = run.exit_code or 0
    ended, by = run.outcome, clean(run.stopped_by, 40)
    if by and ended == "hung":  # the status with which that ended training says nothing
        return f"hung until {by} stopped it"
    if by:
        ended = f"{ended} by {by}"
    if code < 0:
        return f"{ended} (signal {-code})"
    return f"{ended} (exit {code})" if code else ended


def _running(report: Report) -> bool:
    return any(rank.state == "running" for rank in report.ranks)


def first_line(finding: Finding) -> tuple[str, str]:
    """`error[DDP407]` and `unsynced-step: what is wrong`."""
    doubt = " (suspected)" if finding.confidence is Confidence.SUSPECTED else ""
    head = f"{finding.severity.value}[{clean(finding.code, 20)}]"
    return head, f"{clean(finding.check, 60)}{doubt}: {clean(finding.summary, 1000)}"


def whereabouts(finding: Finding) -> list[str]:
    """Line, ranks and steps of a finding; empty where none is known."""
    parts = []
    if finding.location:
        parts.append(clean(finding.location))
        if finding.location.function not in ("", "<module>"):
            parts[0] += f" in {clean(finding.location.function, 60)}"
    if finding.ranks:
        word = "rank" if len(finding.ranks) == 1 else "ranks"
        parts.append(f"{word} {clean(fold_ranks(finding.ranks), 60)}")
    if steps := finding.steps:
        several = steps.count > 1 if steps.total is None else steps.first < steps.total
        parts.append(
            f"first seen at step {steps.first}, in {_how_many(steps)}"
            if several
            else f"in step {steps.first}"
        )
    return parts


def _how_many(steps: Steps) -> str:
    """`2 of 18 steps`, or what was seen of them: `all 10 steps compared`."""
    if steps.compared is None:
        if steps.total is None or steps.total < steps.count:
            return counted(steps.count, "step")
        return f"{steps.count} of {counted(steps.total, 'step')}"
    if steps.compared == steps.count > 1:
        return f"all {steps.count} steps compared since"
    return f"{steps.count} of {counted(steps.compared, 'step')} compared since"


def subjects(finding: Finding) -> str:
    """The things concerned, unless the summary names them all."""
    if all(s in finding.summary for s in finding.subjects):
        return ""
    return some(finding.subjects, 6)


def differed(finding: Finding) -> str:
    """What the ranks recorded differently before a finding; empty where there is nothing to say."""
    return clean(finding.differed or "", 300)


def proofs(finding: Finding, *, whole: bool = False) -> list[Proof]:
    """The evidence, entry by entry, `whole` or the first rows of it; what is empty proves
    nothing."""
    found = []
    for key, value in finding.evidence.items():
        name = title(key)
        if value is None or (isinstance(value, str | Sized) and not value):
            continue
        if isinstance(value, list | tuple) and value and all(isinstance(r, dict) for r in value):
            found.append(Proof(name, grid=_table([dict(r) for r in value], whole)))
        elif isinstance(value, str) and "\n" in value.strip():
            found.append(Proof(name, block=value))
        else:
            found.append(Proof(name, line=figure(value)))
    return found


def _table(rows: list[dict[str, object]], whole: bool) -> Grid:
    folded = _fold_equal(rows)
    names = columns(folded)[:8]
    shown = folded if whole else folded[:EVIDENCE_ROWS]
    cells = tuple(tuple(figure(r[n]) if n in r else "" for n in names) for r in shown)
    return Grid(tuple(title(n) for n in names), cells, len(folded) - len(shown))


def _fold_equal(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows that differ in `rank` only become one, `0-2,4-7`."""
    if not all(isinstance(row.get("rank"), int) for row in rows):
        return rows
    groups: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        rest = repr(sorted((k, repr(v)) for k, v in row.items() if k != "rank"))
        groups.setdefault(rest, []).append(row)
    return [
        {**group[0], "rank": fold_ranks(int(str(r["rank"])) for r in group)}
        for group in groups.values()
    ]


def rank_grid(report: Report) -> Grid:
    """One row per rank, equal ones folded in a large world."""
    fold = report.run.world_size > FOLD_ABOVE
    first = {group[0].rank: rank_row(group) for group in same_place(report.ranks, fold=fold)}
    known = {r.rank for r in report.ranks}
    if known and (gone := [r for r in range(report.run.world_size) if r not in known]):
        first[gone[0]] = (fold_ranks(gone), "no record", "", "", "")
    rows = [first[rank] for rank in sorted(first)]
    return Grid(RANK_COLUMNS, tuple(rows[:ROWS_LIMIT]), max(len(rows) - ROWS_LIMIT, 0))


def same_place(ranks: Iterable[RankState], *, fold: bool) -> list[list[RankState]]:
    """The ranks, if `fold`, those together that ended alike after the same last thing."""
    groups: dict[object, list[RankState]] = {}
    for rank in ranks:
        key = (_state(rank), rank.steps, rank.last) if fold else rank.rank
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def rank_row(group: list[RankState]) -> tuple[str, ...]:
    """The cells of `RANK_COLUMNS` for ranks in the same place."""
    one = group[0]
    times = sorted({duration(r.step_time_s) for r in group if r.step_time_s is not None})
    known = [r.step_time_s for r in group if r.step_time_s is not None]
    time = times[0] if len(times) == 1 else ""
    if len(times) > 1:
        time = f"{duration(min(known))} - {duration(max(known))}"
    steps = "" if one.steps is None else str(one.steps)
    return (fold_ranks(r.rank for r in group), _state(one), steps, time, clean(one.last))


def _state(rank: RankState) -> str:
    why = rank.signal or (f"exit {rank.exit_code}" if rank.exit_code else "")
    return clean(f"{rank.state} ({why})" if why else rank.state, 40)


def tables(report: Report) -> list[Grid]:
    """The report's own tables."""
    return [
        Grid(
            tuple(clean(c, 40) for c in table.columns),
            tuple(tuple(clean(cell, 80) for cell in row) for row in table.rows[:ROWS_LIMIT]),
            max(len(table.rows) - ROWS_LIMIT, 0),
            clean(table.title, 160),
        )
        for table in report.tables
    ]


def verdict(report: Report) -> list[str]:
    """The count line; for a clean run, on what grounds it is called so; where nothing says why it
    ended, where the ranks stood."""
    by = Counter(f.severity for f in report.findings)
    if by:
        lines = [", ".join(counted(by[s], s.value) for s in Severity if by[s])]
        explained = by[Severity.ERROR] or any(f.check == "stall" for f in report.findings)
        return lines if explained or _running(report) else [*lines, *_stood(report)]
    examined = counted(len(report.coverage.examined), "check")
    steps = most_steps(report)
    blind = {rank for u in report.coverage.unobserved for rank in u.ranks}
    seen = [rank for rank in report.ranks if rank.rank not in blind]
    grounds = f"examined {examined} over {counted(len(seen), 'rank')}, {counted(steps, 'step')}"
    if report.suppressed:
        grounds += f"; {counted(len(report.suppressed), 'finding')} suppressed"
    if not report.ranks:
        return ["no rank was observed, so nothing can be said of this run"]
    if not report.coverage.examined:
        return ["nothing was examined, so nothing can be said of this run"]
    if blind and not _running(report):
        if not seen:
            which = _which(report).rstrip(",")
            return [f"{ranks_were(blind)} not observed, so nothing can be said of {which}"]
        partly = f"{ranks_were(blind)} not observed, so {_which(report)} was judged in part"
        lines = [f"{partly}; no fault was found on {ranks_text(r.rank for r in seen)}: {grounds}"]
    elif report.run.outcome == "completed":
        lines = _no_faults("no faults found", report, grounds)
    elif _running(report):
        lines = _no_faults("no faults found so far", report, grounds)
    else:
        stopped = report.run.outcome == "killed" and clean(report.run.stopped_by, 40)
        said = f"no cause found in the records of this run, which {_ended(report)}"
        lines = [
            f"{f'no faults found before {stopped} ended this run' if stopped else said}: {grounds}"
        ]
        lines += _stood(report)
    if not steps:
        lines.append("not observed: no optimizer step seen, so training itself was not judged")
    return lines


def _no_faults(said: str, report: Report, grounds: str) -> list[str]:
    """That nothing was found; that much time was lost nevertheless stands beside it."""
    if not report.lost:
        return [f"{said}: {grounds}"]
    return [f"{said}; {clean(report.lost)}", grounds]


def _which(report: Report) -> str:
    return "this run" if report.run.outcome == "completed" else f"this run, which {_ended(report)},"


def _stood(report: Report) -> list[str]:
    """Where the ranks were at the end: somebody may have ended them because they stood still."""
    rows: dict[str, list[int]] = {}
    for rank in report.ranks:
        if rank.stood:
            rows.setdefault(clean(rank.stood), []).append(rank.rank)
    places = [f"{ranks_were(ranks)} {place}" for place, ranks in list(rows.items())[:PLACES]]
    return [f"at the end {', '.join(places)}"] if places else []


def _ended(report: Report) -> str:
    return {"incomplete": "has no end on record", "killed": "was killed"}.get(
        report.run.outcome, report.run.outcome
    )


def most_steps(report: Report) -> int:
    return max((r.steps or 0 for r in report.ranks), default=0)


def gaps(report: Report, *, saved: bool = True) -> list[str]:
    """What was not examined and why, and what the records lack. All of it, where it was not
    `saved` elsewhere."""
    if not report.ranks:
        skipped = []  # nothing was there to be examined; `missing` says why
    else:
        skipped = _reasons("not examined", report.coverage.skipped, saved)
        skipped += _reasons("left out", report.coverage.partly, saved)
    unused = [f"matches nothing: {clean(text)}" for text in report.unused_suppressions]
    return [*skipped, *(f"missing: {clean(line, 600)}" for line in report.coverage.lost), *unused]


def suppressed(report: Report) -> list[str]:
    """A line for each finding that does not count."""
    return [
        f"suppressed: {s.finding.code} {s.finding.check}{clean(s.finding.elsewhere)}: "
        + clean(s.reason)
        + ("" if s.where == str(s.finding.location) else f" ({clean(s.where)})")
        for s in report.suppressed
    ]


def _reasons(title: str, what: Iterable[Skipped], saved: bool) -> list[str]:
    """One line for all of it: `findings.json` has every check with its reason."""
    by_reason: dict[str, list[str]] = {}
    for skipped in what:
        by_reason.setdefault(clean(skipped.reason), []).append(skipped.check)
    reasons = [
        f"{reason} ({some(of) if len(of) <= NAMED_CHECKS else counted(len(of), 'check')})"
        for reason, of in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]
    more = len(reasons) - REASONS_LIMIT
    if more > 0 and saved:
        reasons[REASONS_LIMIT:] = [f"{counted(more, 'more reason')} in findings.json"]
    return [f"{title}: {'; '.join(reasons)}"] if reasons else []


def overhead(report: Report) -> str:
    cost = report.overhead
    of_device = f", and about {duration(cost.device_s)} of its device" if cost.device_s else ""
    return _of_host(cost) + of_device


def _of_host(cost: Overhead) -> str:
    if cost.measured_percent is None:
        return "the doctor's own time was not measured"
    taken, budget = f"the doctor took {_taken(cost)}", f"budget {cost.budget_percent:g} %"
    if cost.measured_percent <= cost.budget_percent:
        return f"{taken} ({budget})"
    if cost.later_percent is not None:
        later = f"{cost.later_percent:.2g} % after the first {CLOSE_STEPS} steps"
        return f"{taken}, {later} ({budget})"
    start = f"{duration(cost.start_s)} of it to start" if cost.start_s else "most of it early on"
    return f"{taken}, {start}"


def _taken(cost: Overhead) -> str:
    """In percent; of a short run a percentage says nothing of longer ones like it."""
    if cost.own_s is None or cost.wall_s is None or cost.wall_s >= SHORT_RUN_S:
        return f"{cost.measured_percent:.2g} % of the run's time"
    return f"{duration(cost.own_s)} of {duration(cost.wall_s)}"


def explain_command(finding: Finding) -> str:
    """The command that prints the page of a finding's check; of a check that failed itself, the
    page of what it would have looked for."""
    broken = finding.code == "DDP001" and finding.subjects
    return f"ddpdoctor explain {clean(finding.subjects[0] if broken else finding.code, 60)}"


def rule(finding: Finding) -> str:
    """The rule that decided, empty where the check has one only."""
    return clean(finding.rule, 60) if finding.rule not in ("", finding.check) else ""


def widths(grid: Grid) -> Sequence[int]:
    """Columns each column needs, in characters of a fixed-width page."""
    from rich.cells import cell_len

    return [
        max(cell_len(name), *(cell_len(row[i]) for row in grid.rows), 0)
        for i, name in enumerate(grid.columns)
    ]
