"""A running run, as its folder grows: a table at the bottom of the terminal, or a line in a log.

The ranks write to the same terminal and their output is not ours to touch. So the table stands in
rows reserved at the bottom of the screen: the terminal scrolls what the ranks print in the region
above (DECSTBM, as package managers do for their progress bars).
"""

from __future__ import annotations

import re
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TextIO

from rich.table import Table
from rich.text import Text

from ..report.diagnose import last_thing
from ..report.findings import Finding, Severity
from ..run import Rank, Run, counted, fold_ranks, progress, ranks_text
from ..run.steps import reported_steps
from . import report_text
from .report_text import Grid
from .safe_text import clean, duration
from .streams import emit, is_terminal
from .terminal import STYLES, captured, make_console, rank_table, show

MOST_ROWS = 12
MOST_LINES = 60
MOST_FINDINGS = 3
SILENT_S = 30.0
LEAST_SCREEN = 12
"""Terminals lower than this keep all their rows."""
SHARE = 0.02
"""The share of the time that may go into looking and drawing."""
LOG_S = 30.0
"""Between two lines of a log."""
TIMES = 2
"""From so many times the duration on, a step is said to take so many times as long."""

CHANGED = 0.1
"""A speed that changed by less is the same."""
BEHIND = 2
"""A rank that has taken so many steps fewer than most is shown by itself."""

COLUMNS = ("rank", "state", "steps", "waits", "memory", "now")
_FOR = re.compile(r" for \d+ s$")


@dataclass(frozen=True)
class Row:
    """Where a rank is now; `waits`: a share of its steps; `memory` in bytes."""

    rank: int
    state: str
    steps: int
    waits: float | None
    memory: int | None
    doing: str


def snapshot(
    run: Run,
    folder: str,
    width: int,
    rows: int,
    *,
    styled: bool,
    gone: bool = False,
    findings: Sequence[Finding] | None = None,
    listed: bool = True,
) -> str:
    """Where every rank is now, in at most `rows` lines.

    Args:
        gone: no process of the run is there any more, though no end is on record.
        findings: those so far; None where nobody looks for them.
        listed: each has a line of its own, the latest few.
    """
    over = gone or run.info.ended_at is not None
    console = make_console(StringIO(), width, styled)
    show(console, Text(_status(run, folder, over), "bold"))
    facts = [] if over else state(run)
    if findings is not None:
        facts.append(so_far(findings))
    facts = lines_of(facts, width)
    for fact in facts:
        show(console, Text(fact))
    shown = list(findings or ())[-MOST_FINDINGS:] if listed else []
    for finding in shown:
        head, sentence = report_text.first_line(finding)
        line = Text(f"{head} {sentence}{clean(finding.elsewhere)}", no_wrap=True)
        line.stylize(STYLES[finding.severity], 0, len(head))
        line.truncate(width, overflow="ellipsis")
        show(console, line)
    if run.ranks:
        show(console, _table(run, max(rows - 2 - len(facts) - len(shown), 1), width, over))
    return captured(console)


def lines_of(facts: Sequence[str], width: int) -> list[str]:
    """Facts side by side, as many on a line as fit."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + 2 + len(fact) <= width:
            lines[-1] += f", {fact}"
        else:
            lines.append(fact)
    return lines


def state(run: Run) -> list[str]:
    """How far the run is, how fast, and what its ranks wait and hold, in words."""
    last = min(run.training_ranks(), key=lambda r: (r.steps, r.rank), default=None)
    if last is None:
        return []
    if all(r.state != "lost" and not r.alive for r in run.ranks.values()):
        return [f"step {reported_steps(last)}", "all ranks so far have ended"]
    now = progress.clock(last)
    facts = [f"step {reported_steps(last)}"]
    if run.stall is None and (fast := progress.speed(last, now)) is not None:
        facts.append(_speed(fast))
    if (epoch := progress.epoch(last, now)) is not None:
        left = f", {_whole(epoch.left_s)} left" if epoch.left_s is not None else ""
        facts.append(f"epoch {epoch.number}: {epoch.done} of {epoch.batches} batches{left}")
    shares = [s for r in run.ranks.values() if (s := progress.waiting_share(r)) is not None]
    if shares:
        facts.append(f"ranks wait {100 * statistics.mean(shares):.0f} % of the time")
    if held := progress.memory(run):
        facts.append(f"{_bytes(max(held.values()))}{' a rank' if len(held) > 1 else ''}")
    return facts


def _speed(fast: progress.Speed) -> str:
    per = fast.per_second
    said = f"{per:.3g} steps/s" if per >= 1 or not per else f"{duration(1 / per)} a step"
    if not fast.before or abs(per / fast.before - 1) < CHANGED:
        return said
    if per and fast.before >= TIMES * per:
        times = fast.before / per
        return f"{said} (a step takes {times:.{0 if times >= 10 else 1}f} times as long as before)"
    how = "slower" if per < fast.before else "faster"
    return f"{said} ({100 * abs(per / fast.before - 1):.0f} % {how} than before)"


def so_far(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings so far`."""
    by = Counter(f.severity for f in findings)
    counts = [counted(by[s], s.value) for s in Severity if by[s]]
    return f"{', '.join(counts) or 'no finding'} so far"


def told(finding: Finding) -> str:
    """A finding as one line of a log."""
    head, sentence = report_text.first_line(finding)
    return f"{head} {sentence}{clean(finding.elsewhere)}"


def _whole(seconds: float) -> str:
    return f"{max(seconds, 0.0):.0f} s" if seconds < 100 else duration(seconds)


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _status(run: Run, folder: str, over: bool) -> str:
    parts = [run.outcome() if over else "running", counted(run.world_size, "rank")]
    if run.started and not over:
        parts.append(_whole(time.time() - run.started))
        silent = time.time() - max(r.wall(r.last.at) for r in run.ranks.values() if r.last)
        if silent > SILENT_S:
            parts.append(f"no new record for {duration(silent)}")
    if run.missing and run.ranks:
        parts.append(f"no record{'' if over else ' yet'} of {ranks_text(run.missing)}")
    elif not run.ranks:
        parts.append("no rank has reported" + ("" if over else " yet"))
    return f"{clean(folder)}: {', '.join(parts)}"


def _row(run: Run, rank: Rank, memory: int | None, over: bool) -> Row:
    state = rank.state
    if not over and state == "lost":
        state = "running"
    now = progress.doing(run, rank) if state == "running" and not over else ""
    return Row(
        rank.rank,
        state,
        reported_steps(rank),
        progress.waiting_share(rank),
        memory,
        now or last_thing(run, rank),
    )


def _table(run: Run, limit: int, width: int, over: bool) -> Table:
    """One row per rank; where they do not fit, ranks in the same place share one."""
    held = progress.memory(run)
    rows = [_row(run, rank, held.get(rank.rank), over) for rank in run.ranks.values()]
    together = _folded(rows) if len(rows) > limit else [[row] for row in rows]
    cells = tuple(map(_cells, together[:limit]))
    more = max(len(together) - limit, 0)
    grid = Grid(COLUMNS, cells[: limit - 1] if more else cells, more + (more > 0))
    return rank_table(grid, width)


def _folded(rows: Sequence[Row]) -> list[list[Row]]:
    """Ranks that do the same share a row; those that are behind come first: they are what one looks
    for."""
    usual = statistics.median(row.steps for row in rows)
    groups: dict[object, list[Row]] = {}
    for row in rows:
        behind = row.steps if row.steps < usual - BEHIND else None
        groups.setdefault((row.state, _FOR.sub("", row.doing), behind), []).append(row)
    return sorted(groups.values(), key=lambda g: (min(r.steps for r in g), g[0].rank))


def _cells(group: Sequence[Row]) -> tuple[str, ...]:
    steps = sorted({row.steps for row in group})
    waits = [row.waits for row in group if row.waits is not None]
    held = [row.memory for row in group if row.memory is not None]
    return (
        fold_ranks(row.rank for row in group),
        clean(group[0].state, 40),
        str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}",
        f"{100 * statistics.mean(waits):.0f} %" if waits else "",
        _bytes(max(held)) if held else "",
        clean(group[0].doing),
    )


class LiveView:
    """The table at the bottom of the terminal. Silent where the stream is no terminal."""

    def __init__(self, folder: str | Path, stream: TextIO | None = None) -> None:
        self.folder = str(folder)
        self._stream = sys.stderr if stream is None else stream
        self._on = is_terminal(self._stream)
        self._reserved = 0
        self._screen = (0, 0)
        self._next = 0.0

    def update(self, run: Run, findings: Sequence[Finding] | None = None) -> None:
        """Redraw, unless that took long the last time. Never raises: a terminal that is gone turns
        the view off."""
        size = shutil.get_terminal_size((80, 24))
        began = time.monotonic()
        same = self._screen == (size.columns, size.lines)
        if not self._on or size.lines < LEAST_SCREEN or (same and began < self._next):
            return
        rows = min(MOST_ROWS, size.lines // 3)
        text = snapshot(
            run, self.folder, size.columns, rows, styled=True, findings=findings, listed=False
        )
        lines = text.rstrip("\n").split("\n")[:rows]
        self._write(self._region(size.columns, size.lines, rows) + self._drawn(lines, size.lines))
        ended = time.monotonic()
        self._next = ended + (ended - began) / SHARE

    def close(self) -> None:
        """Give the rows back."""
        if self._on and self._reserved:
            _, height = self._screen
            top = height - self._reserved + 1
            self._write(f"\x1b7\x1b[r\x1b[{top};1H\x1b[J\x1b8")
        self._reserved = 0
        self._on = False

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _region(self, width: int, height: int, rows: int) -> str:
        """Reserve the bottom rows, where that is not yet done for this size of screen."""
        if self._reserved == rows and self._screen == (width, height):
            return ""
        self._reserved, self._screen = rows, (width, height)
        # Line feeds first, so that what stands there scrolls up instead of being drawn over.
        room = "\n" * rows + f"\x1b[{rows}A"
        return f"{room}\x1b7\x1b[1;{height - rows}r\x1b8"

    def _drawn(self, lines: list[str], height: int) -> str:
        top = height - self._reserved + 1
        padded = lines + [""] * (self._reserved - len(lines))
        body = "".join(f"\x1b[{top + i};1H\x1b[2K{line}" for i, line in enumerate(padded))
        return f"\x1b7\x1b[?7l{body}\x1b[?7h\x1b8"

    def _write(self, text: str) -> None:
        try:
            emit(text, self._stream)
        except (OSError, ValueError):
            self._on = False
            self._reserved = 0


class LogLines:
    """A line about the run every `LOG_S`, for a log that nobody watches."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next = time.monotonic() + LOG_S

    def update(self, run: Run, findings: Sequence[Finding] | None = None) -> None:
        """Say how far the run is, where it is time for that."""
        now = time.monotonic()
        if now < self._next or not run.ranks:
            return
        facts = state(run) or ["no step yet"]
        facts += [so_far(findings)] if findings is not None else []
        self._say(f"after {_whole(time.time() - run.started)}: {', '.join(facts)}")
        spent = time.monotonic() - now
        self._next = now + max(LOG_S, spent / SHARE)
