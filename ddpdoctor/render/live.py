"""The table of a running run, redrawn as its folder grows.

The ranks write to the same terminal and their output is not ours to touch. So the table stands in
rows reserved at the bottom of the screen: the terminal scrolls what the ranks print in the region
above (DECSTBM, as package managers do for their progress bars).
"""

from __future__ import annotations

import shutil
import sys
import time
from io import StringIO
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from ..report.diagnose import row
from ..run import Run, counted, ranks_text
from ..run.last_activity import whereabouts
from .report_text import RANK_COLUMNS, Grid, rank_row, same_place
from .safe_text import clean, duration
from .streams import emit, is_terminal
from .terminal import captured, make_console, rank_table, show

MOST_ROWS = 12
MOST_LINES = 60
SILENT_S = 30.0
LEAST_SCREEN = 12
"""Terminals lower than this keep all their rows."""


def snapshot(
    run: Run, folder: str, width: int, rows: int, *, styled: bool, gone: bool = False
) -> str:
    """Where every rank is now, in at most `rows` lines.

    Args:
        gone: no process of the run is there any more, though no end is on record.
    """
    over = gone or run.info.ended_at is not None
    console = make_console(StringIO(), width, styled)
    show(console, Text(_status(run, folder, over), "bold"))
    if run.ranks:
        show(console, _table(run, max(rows - 2, 1), width, over))
    return captured(console)


def _status(run: Run, folder: str, over: bool) -> str:
    parts = [run.outcome() if over else "running", counted(run.world_size, "rank")]
    if run.started and not over:
        parts.append(duration(max(time.time() - run.started, 0.0)))
        silent = time.time() - max(r.wall(r.last.at) for r in run.ranks.values() if r.last)
        if silent > SILENT_S:
            parts.append(f"no new record for {duration(silent)}")
    if run.missing and run.ranks:
        parts.append(f"no record{'' if over else ' yet'} of {ranks_text(run.missing)}")
    elif not run.ranks:
        parts.append("no rank has reported" + ("" if over else " yet"))
    return f"{clean(folder)}: {', '.join(parts)}"


def _table(run: Run, limit: int, width: int, over: bool) -> Table:
    """One row per rank; where they do not fit, ranks in the same place share one."""
    states = [row(rank, whereabouts(run, rank, live=not over)) for rank in run.ranks.values()]
    if not over:
        lost = {"lost": "running"}
        states = [replace(one, state=lost.get(one.state, one.state)) for one in states]
    ordered = same_place(states, fold=len(states) > limit)
    if len(states) > limit:  # those that are behind first: they are what one looks for
        ordered.sort(key=lambda g: (g[0].steps, g[0].rank))
    cells = tuple(map(rank_row, ordered[:limit]))
    more = max(len(ordered) - limit, 0)
    grid = Grid(RANK_COLUMNS, cells[: limit - 1] if more else cells, more + (more > 0))
    return rank_table(grid, width)


class LiveView:
    """The table at the bottom of the terminal. Silent where the stream is no terminal."""

    def __init__(self, folder: str | Path, stream: TextIO | None = None) -> None:
        self.folder = str(folder)
        self._stream = sys.stderr if stream is None else stream
        self._on = is_terminal(self._stream)
        self._reserved = 0
        self._screen = (0, 0)

    def update(self, run: Run) -> None:
        """Redraw. Never raises: a terminal that is gone turns the view off."""
        size = shutil.get_terminal_size((80, 24))
        if not self._on or size.lines < LEAST_SCREEN:
            return
        rows = min(MOST_ROWS, size.lines // 3)
        text = snapshot(run, self.folder, size.columns, rows, styled=True)
        lines = text.rstrip("\n").split("\n")[:rows]
        self._write(self._region(size.columns, size.lines, rows) + self._drawn(lines, size.lines))

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
