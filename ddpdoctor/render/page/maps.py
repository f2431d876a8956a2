"""Maps of ranks and steps, as coloured cells: step time, waiting, loss, batch size, drift, memory.

A large run is folded: a column stands for several steps, a row for several ranks, and a cell for
the worst of these ranks. Cells of one colour are one path, so that a map stays small.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...analysis.replicas.replicas import by_rank, replicas
from ...events import BatchSeen, LossValues, MemorySample, Pace, StepDone
from ...report.findings import Report
from ...run import Run, counted, listed, ranks_text
from ..safe_text import duration
from .axis import round_marks

MOST_ROWS, MOST_COLUMNS, LEVELS = 48, 96, 7
FEWEST_STEPS = 3
"""With fewer there is nothing to see."""

HIGH, LEAST_SPREAD = 0.99, 0.25
"""The share of cells below the darkest colour, and by how much that colour is above the lightest at
least, as a share of it: values that are almost alike get almost the same colour."""

LEAST = "Of several ranks, the one that waits least is shown: others wait for it."

MOST_TICKS, FREE = 5, 14.0
"""Steps named below a map, and how far from its ends they are at least, in percent."""

ROW_PIXELS, LEAST_PIXELS, WHOLE_PIXELS, LABEL_PIXELS = 20, 9, 460, 15


@dataclass(frozen=True)
class Values:
    """What a rank measured over steps `first` to `last`."""

    first: int
    last: int
    value: float


ByRank = Mapping[int, Sequence[Values]]


@dataclass(frozen=True)
class Kind:
    """A map to be drawn.

    Attributes:
        read: what each rank has on record of it; missing: why there is nothing.
        least: of several ranks, the smallest is shown: who waits least is waited for.
        said: a value as text; mean: a cell is the mean of its steps, else the largest of them.
        zero: colours begin at 0.
        below: values below 0 are meant.
        varies: it is worth drawing only where values differ.
        lasting: a value was measured once and stands until the next one.
    """

    name: str
    title: str
    missing: str
    read: Callable[[Run], ByRank]
    said: Callable[[float], str]
    mean: bool = True
    zero: bool = False
    least: bool = False
    below: bool = False
    varies: bool = False
    lasting: bool = False


@dataclass(frozen=True)
class Map:
    """A map, ready to print.

    Attributes:
        rows, columns: the ranks of each row and the steps of each column, as text.
        each: the steps of a column, of the last one at most.
        ticks: where steps are named below, in percent of the width.
        labels: those of the rows that are shown; empty where there is no room.
        paths: by colour, from the lightest on, the cells of that colour.
        shades: the colours of the legend.
        cells: the value of each cell as text, row by row; empty where there is none.
        low, high: the least and the largest of these values, which the legend leads from and to;
            `high` is empty where they are one.
        gaps: some cells have no value.
        said: where it is highest, in a sentence; note: what a cell stands for.
        pixels: the height of a row.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    each: int
    ticks: tuple[tuple[float, str], ...]
    labels: tuple[str, ...]
    paths: tuple[str, ...]
    shades: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]
    low: str
    high: str
    gaps: bool
    said: str
    note: str
    pixels: int

    @property
    def texts(self) -> str:
        """All values for the script: cells by `,`, rows by `;`."""
        return ";".join(",".join(row) for row in self.cells)


@dataclass(frozen=True)
class Maps:
    """The maps, and a line about those that are not there."""

    maps: tuple[Map, ...]
    left_out: str


def maps(report: Report, run: Run) -> Maps:
    """The maps of what is on record."""
    steps = max((r.steps for r in run.ranks.values()), default=0)
    if steps < FEWEST_STEPS:
        few = "no optimizer step is" if not steps else "fewer than three steps are"
        return Maps((), f"There are no maps of ranks and steps: {few} on record.")
    drawn, left_out = [], []
    for kind in KINDS:
        values = {rank: list(v) for rank, v in kind.read(run).items() if v}
        if values and kind.name == "drift" and not any(v.value for m in values.values() for v in m):
            compared = len({v.first for m in values.values() for v in m})
            equal = f"equal in {'all ' * (compared > 1)}{counted(compared, 'step')} compared"
            left_out.append(f"{kind.title.lower()} ({equal})")
        elif values and kind.varies and len({v.value for m in values.values() for v in m}) == 1:
            (same, *_), *_ = values.values()
            left_out.append(f"{kind.title.lower()} ({kind.said(same.value)} everywhere)")
        elif values:
            drawn.append(_drawn(kind, values, steps, list(run.ranks)))
        else:
            left_out.append(f"{kind.title.lower()} ({kind.missing})")
    return Maps(tuple(drawn), f"Not drawn: {listed(left_out)}." if left_out else "")


def _step_times(run: Run) -> ByRank:
    found = {}
    for rank in run.ranks.values():
        records = rank.of(StepDone)
        taken = Counter(e.optimizer for e in records)
        busiest = max(taken, key=lambda o: (taken[o], -o), default=-1)
        mine = [e for e in records if e.optimizer == busiest][1:]  # the first is of the start, too
        found[rank.rank] = [_over(e.step, e.count, e.wall_s / max(1, e.count)) for e in mine]
    return found


def _waiting(run: Run) -> ByRank:
    ranks = [r for r in run.ranks.values() if not r.waits_on_gpu]
    return {r.rank: [_over(e.step, e.count, e.waited_s) for e in r.of(Pace)] for r in ranks}


def _memory(run: Run) -> ByRank:
    return _sampled(run, lambda sample: sample.rss_bytes)


def _device_memory(run: Run) -> ByRank:
    return _sampled(run, lambda sample: sample.device_bytes)


def _sampled(run: Run, size: Callable[[MemorySample], int]) -> ByRank:
    samples = {r.rank: [(e.step, size(e)) for e in r.of(MemorySample)] for r in run.ranks.values()}
    return _lasting(run, {r: [s for s in own if s[1] > 0] for r, own in samples.items()})


def _losses(run: Run) -> ByRank:
    return _lasting(
        run,
        {
            r.rank: [s for e in r.of(LossValues) for s in zip(e.steps, e.values, strict=False)]
            for r in run.ranks.values()
        },
    )


def _batches(run: Run) -> ByRank:
    """Of the model that got the most different ones."""
    known = {r.rank: [e for e in r.of(BatchSeen) if e.step >= 0] for r in run.ranks.values()}
    changes = Counter(e.model for own in known.values() for e in own)
    model = max(changes, key=lambda m: (changes[m], -m), default=-1)
    return _lasting(
        run, {r: [(e.step, e.size) for e in own if e.model == model] for r, own in known.items()}
    )


def _lasting(run: Run, samples: Mapping[int, Sequence[tuple[int, float]]]) -> ByRank:
    """Until the next sample, a step and a value, a rank has what the last one says."""
    found: dict[int, list[Values]] = {}
    for rank, own in samples.items():
        ends = [step - 1 for step, _ in own[1:]] + [max(run.ranks[rank].steps - 1, 0)]
        found[rank] = [
            Values(step, max(step, end), float(value))
            for (step, value), end in zip(own, ends, strict=False)
        ]
    return found


def _drift(run: Run) -> ByRank:
    """1 in steps before which a rank held other parameters than most, else 0."""
    found: dict[int, list[Values]] = {}
    for group in replicas(run):
        tables = {} if group.left_out else by_rank(group, "parameters", "step")
        for step in sorted({key for table in tables.values() for key in table}):
            rows = {rank: table[step] for rank, table in tables.items() if step in table}
            if len(rows) < 2:
                continue
            if len({made for _, _, made in rows.values()}) > 1:
                break  # these are no longer the same step
            counts = Counter(rows.values())
            most, many = counts.most_common(1)[0]
            agreed = most if 2 * many > len(rows) else None
            for rank, row in rows.items():
                found.setdefault(rank, []).append(Values(step, step, float(row != agreed)))
    return found


def _over(last: int, count: int, value: float) -> Values:
    return Values(max(0, last - max(count, 1) + 1), last, value)


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


KINDS = (
    Kind("steps", "Step time", "not on record", _step_times, duration),
    Kind("waiting", "Waiting for other ranks in a step", "not on record", _waiting, duration,
         zero=True, least=True),
    Kind("loss", "Loss", "none on the CPU was seen", _losses, lambda value: f"{value:.4g}",
         below=True, lasting=True),
    Kind("batch", "Batch size", "not on record", _batches, lambda value: f"{value:.0f}",
         varies=True, lasting=True),
    Kind("drift", "Parameters that differ between ranks", "no copies were compared", _drift,
         lambda value: "differs" if value else "equal", mean=False, zero=True),
    Kind("memory", "Memory on the host", "not on record", _memory, _bytes, mean=False,
         lasting=True),
    Kind("device", "Memory on the device", "no device", _device_memory, _bytes, mean=False,
         lasting=True),
)  # fmt: skip


def _drawn(kind: Kind, values: Mapping[int, list[Values]], steps: int, every: list[int]) -> Map:
    columns = _folded(range(steps), MOST_COLUMNS)
    rows = _folded(every, MOST_ROWS)
    cells = [_row(kind, [values.get(r, []) for r in ranks], columns) for ranks in rows]
    known = sorted(v for row in cells for v in row if v is not None)
    low = 0.0 if kind.zero else known[0]
    high = max(known[min(len(known) - 1, int(HIGH * len(known)))], low + LEAST_SPREAD * abs(low))
    row_names = tuple(ranks_text(ranks) for ranks in rows)
    column_names = tuple(_steps_text(column) for column in columns)
    pixels = max(LEAST_PIXELS, min(ROW_PIXELS, WHOLE_PIXELS // len(rows)))
    every_nth = math.ceil(LABEL_PIXELS / pixels)
    least, most = kind.said(known[0]), kind.said(known[-1])
    shades = tuple(range(_level(known[0], low, high), _level(known[-1], low, high) + 1))
    note = [_measured(kind, values, len(columns[0]))]
    note += [LEAST] if kind.least and len(rows) < len(every) else []
    if known[-1] > high:
        darkest = kind.said(low + (high - low) * (LEVELS - 1) / LEVELS)
        note.append(f"The strongest colour stands for {darkest} and more.")
    return Map(
        name=kind.name,
        title=kind.title,
        rows=row_names,
        columns=column_names,
        each=len(columns[0]),
        ticks=tuple(_ticks(columns)),
        labels=tuple(n if i % every_nth == 0 else "" for i, n in enumerate(row_names)),
        paths=tuple(_paths(cells, low, high)),
        shades=(0, LEVELS - 1) if kind.name == "drift" else shades,
        cells=tuple(tuple("" if v is None else kind.said(v) for v in row) for row in cells),
        low=least,
        high=most if most != least else "",
        gaps=any(v is None for row in cells for v in row),
        said=_highest(kind, cells, row_names, column_names),
        note=" ".join(note),
        pixels=pixels,
    )


def _measured(kind: Kind, values: Mapping[int, list[Values]], each: int) -> str:
    """What a cell stands for: one measurement, or the mean or the largest of several."""
    if kind.name == "drift":
        return "The copies were compared before some of the steps only."
    longest = max(v.last - v.first + 1 for own in values.values() for v in own)
    parts = []
    if each > 1:
        parts.append(f"a cell is {'the mean' if kind.mean else 'the largest'} of its steps")
    if kind.lasting:
        parts.append("a value stands until the next one was measured")
    elif longest > 1:
        parts.append(f"measured as the mean of up to {longest} steps at a time")
    said = "; ".join(parts) or "measured in each step"
    return f"{said[:1].upper()}{said[1:]}."


def _ticks(columns: Sequence[Sequence[int]]) -> Iterator[tuple[float, str]]:
    """The first step, the last one, and round ones between them."""
    last, wide = columns[-1][-1], 100 / len(columns)
    yield 0.0, f"step {columns[0][0]}"
    for at, text in round_marks(columns[0][0], last, MOST_TICKS):
        x = wide * (int(at) // len(columns[0]) + 0.5)
        if at == int(at) and FREE < x < 100 - FREE:
            yield round(x, 2), text
    yield 100.0, str(last)


def _folded(every: Sequence[int], most: int) -> list[Sequence[int]]:
    """In parts that follow each other, `most` of them at most, as long as each other."""
    size = math.ceil(len(every) / most)
    return [every[at : at + size] for at in range(0, len(every), size)]


def _steps_text(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _row(
    kind: Kind, ranks: Sequence[Sequence[Values]], columns: Sequence[Sequence[int]]
) -> list[float | None]:
    """For each column the value of one of these ranks: the largest, or the least."""
    choose = min if kind.least else max
    worst: list[float | None] = [None] * len(columns)
    size = len(columns[0])
    for values in ranks:
        sums: dict[int, float] = defaultdict(float)
        counts: dict[int, int] = defaultdict(int)
        for one in values:
            last = min(one.last // size, len(columns) - 1)
            if not math.isfinite(one.value) or (one.value < 0 and not kind.below):
                continue
            for column in range(min(one.first // size, len(columns)), last + 1):
                if kind.mean:
                    inside = min(one.last, (column + 1) * size - 1)
                    count = max(1, inside - max(one.first, column * size) + 1)
                    sums[column] += one.value * count
                    counts[column] += count
                else:
                    sums[column], counts[column] = max(sums[column], one.value), 1
        for column, total in sums.items():
            mine, before = total / counts[column], worst[column]
            worst[column] = mine if before is None else choose(mine, before)
    return worst


def _paths(cells: Sequence[Sequence[float | None]], low: float, high: float) -> Iterator[str]:
    """The cells of each colour, neighbours in a row as one."""
    found: list[list[str]] = [[] for _ in range(LEVELS)]
    for y, row in enumerate(cells):
        levels = [None if v is None else _level(v, low, high) for v in row]
        begin = 0
        for x in range(1, len(levels) + 1):
            if x == len(levels) or levels[x] != levels[begin]:
                if (level := levels[begin]) is not None:
                    found[level].append(f"M{begin} {y}h{x - begin}v1h-{x - begin}z")
                begin = x
    return ("".join(parts) for parts in found)


def _level(value: float, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return max(0, min(LEVELS - 1, int(share * LEVELS)))


def _highest(
    kind: Kind,
    cells: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
) -> str:
    places = [(v, y, x) for y, row in enumerate(cells) for x, v in enumerate(row) if v is not None]
    value, y, x = max(places, key=lambda place: (place[0], -place[2], -place[1]))
    if kind.name != "drift":
        return f"Highest on {rows[y]} in {columns[x]}: {kind.said(value)}."
    apart = [rows[n] for n, row in enumerate(cells) if any(row)]
    return f"First seen in {columns[x]}: {listed(apart)}."
