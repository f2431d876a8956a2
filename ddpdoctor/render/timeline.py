"""One rank's story: its records in order, as lines for people, and where it was last."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from rich.text import Text

from ..events import RankExiting, RankStarted, StepDone, TorchLoaded
from ..report.diagnose import rows
from ..run import Rank, Run, counted
from ..run.last_activity import whereabouts
from .safe_text import clean, clean_lines, duration
from .terminal import captured, make_console, show

LINES_LIMIT = 2000
STACK_LINES = 400
STACK_BYTES = 256 * 1024


def render(
    runs: Sequence[Run], rank: int, stacks: Sequence[Path], width: int, *, styled: bool
) -> str:
    console = make_console(StringIO(), width, styled)
    for run in runs:
        for line in _told(run, run.ranks[rank], len(runs) > 1):
            show(console, line)
    for path in stacks:
        dump = _dump(path)
        if not any(dump):
            continue  # opened in advance, and no dump was asked for
        show(console, Text(f"\n{clean(path.name)}", "bold"))
        for text in dump:
            show(console, Text(f"  {text}"))
    return captured(console)


def _told(run: Run, rank: Rank, several: bool) -> Iterator[Text]:
    attempt = f", attempt {run.attempt}" if several else ""
    where = f" on {clean(rank.node)}" if rank.node else ""
    yield Text(f"rank {rank.rank} of {run.world_size}{where}{attempt}", "bold")
    if run.left_behind:
        yield from _left(run, rank)
        return
    ended = rank.signal or (f"exit {rank.exit_code}" if rank.exit_code is not None else "")
    yield Text(f"{rank.state}{f' ({ended})' if ended else ''} after {counted(rank.steps, 'step')}")
    if stood := whereabouts(run, rank):
        yield Text(f"it stood {clean(stood)}")
    yield Text()
    shown = 0
    for shown, line in enumerate(_lines(rank)):
        if shown == LINES_LIMIT:
            yield Text(f"and more; the whole is in the rank-{rank.rank} files")
            break
        yield line
    for twin in rank.twins:
        yield Text(f"\nanother process, pid {twin.pid or '?'}, claimed this rank too:")
        yield from _lines(twin)


def _left(run: Run, rank: Rank) -> Iterator[Text]:
    """What a rank of a run without the doctor left behind: when is not always known."""
    row = next(r for r in rows(run) if r.rank == rank.rank)
    ended = row.signal or (f"exit {row.exit_code}" if row.exit_code is not None else "")
    yield Text(f"{row.state}{f' ({ended})' if ended else ''}")
    if row.stood:
        yield Text(f"it stood {clean(row.stood)}")
    yield Text()
    for event in rank:
        ours = isinstance(event, RankStarted | RankExiting | TorchLoaded)
        if not ours and (described := event.describe()):
            yield Text(clean(described))


def _lines(rank: Rank) -> Iterator[Text]:
    """Described events; steps between two of them become one line."""
    origin = rank.started.at if rank.started else 0.0
    pending: list[StepDone] = []
    for event in rank:
        if isinstance(event, StepDone):
            pending.append(event)
            continue
        described = event.describe()
        if not described:
            continue
        yield from _steps(rank, pending, origin)
        pending = []
        style = "bold" if isinstance(event, RankStarted) else ""
        yield Text.assemble((_clock(rank, event.at, origin), "dim"), (clean(described), style))
    yield from _steps(rank, pending, origin)
    if rank.last:
        last = rank.latest(StepDone)
        place = rank.location(last.site) if last else None
        where = f"; last step at {clean(place)}" if place else ""
        yield Text(f"last record {duration(rank.last.at - origin)} after the start{where}")


def _steps(rank: Rank, steps: list[StepDone], origin: float) -> Iterator[Text]:
    if not steps:
        return
    first, last = steps[0], steps[-1]
    begin = first.step - first.count + 1
    span = f"step {begin}" if begin == last.step else f"steps {begin}-{last.step}"
    place = rank.location(last.site)
    where = f" at {clean(place)}" if place else ""
    usual = statistics.median(
        s.wall_s / max(1, s.count) for s in steps
    )  # the first step takes seconds
    yield Text.assemble(
        (_clock(rank, last.at, origin), "dim"), f"{span}{where}, {duration(usual)} each"
    )


def _clock(rank: Rank, at: float, origin: float) -> str:
    if not rank.started:
        return f"+{at - origin:8.3f} s  "
    try:
        clock = time.strftime("%H:%M:%S", time.localtime(rank.wall(at)))
    except (ValueError, OverflowError, OSError):  # a record with a nonsensical time
        clock = "--:--:--"
    return f"{clock} +{at - origin:.3f} s  "


def _dump(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(STACK_BYTES).decode(errors="replace")
    except OSError as error:
        return [f"cannot be read ({error.strerror})"]
    return clean_lines(text, STACK_BYTES, STACK_LINES)
