"""The picture of a run that stood still: where its ranks stood, and who waited for whom.

Ranks with the same stack share a box; an arrow leads from those that wait to those they wait for.
Boxes that wait stand above those they wait for, so that who holds up all others stands last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ...analysis.waiting.failures import Failure, failure
from ...analysis.waiting.snapshot import DOING, RankSnapshot, Snapshot, snapshot_of
from ...analysis.waiting.wait_graph import awaited
from ...events import RankExiting
from ...report.findings import Finding, Report, Severity
from ...run import Location, Run, counted, ranks_text, shorten
from ..safe_text import clean, cut, duration

MOST_BOXES = 12
IN_A_ROW = 3
CALLERS = 3
"""Lines of the stack shown beside the one where the ranks stand."""

WIDE, GAP, BETWEEN = 460, 28, 64
"""A box, and what is between two boxes and two rows, in pixels."""
LINE = 20
CHARACTERS, CODE_CHARACTERS = 60, 55
"""That fit into a box."""


@dataclass(frozen=True)
class Text:
    """A line in a box; `kind` is a class of the style sheet."""

    text: str
    kind: str


@dataclass(frozen=True)
class Box:
    """Ranks that stood at the same place.

    Attributes:
        title: `ranks 0,2-3`.
        fault: the findings say that they are at fault; `waits` for others.
        told: where they stood, in words; stack: of the user's code, innermost first.
    """

    ranks: tuple[int, ...]
    title: str
    lines: tuple[Text, ...]
    told: str
    stack: tuple[str, ...]
    fault: bool
    waits: bool
    seconds: float
    x: float = 0.0
    y: float = 0.0

    @property
    def height(self) -> float:
        return LINE * (len(self.lines) + 2)


@dataclass(frozen=True)
class Arrow:
    """From a box that waits to one it waits for, as a path."""

    path: str
    said: str
    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    """Boxes and arrows, placed.

    Attributes:
        title: what is shown; told: the same in a sentence for each box; more: what is not shown.
    """

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    told: tuple[str, ...]
    more: str
    width: float
    height: float


def picture(report: Report, run: Run) -> Picture | None:
    """The picture; None where nothing stood still and no rank waited for another one."""
    now = snapshot_of(run)
    waits = _graph(now)
    if report.run.outcome == "completed" or not (waits or now.stall):
        return None
    drawn = _Drawn(now, waits, _blamed(report))
    kept = drawn.boxes[:MOST_BOXES]
    placed = _placed(kept, drawn.edges)
    more = drawn.boxes[MOST_BOXES:]
    left_out = f"{counted(len(more), 'more group')} of ranks are not drawn" if more else ""
    blame = "" if any(b.fault for b in drawn.boxes) else "No finding blames one of them alone"
    return Picture(
        title=_title(now),
        boxes=tuple(placed),
        arrows=tuple(_arrows(placed, drawn.edges)),
        told=tuple(drawn.told),
        more=". ".join(text for text in (blame, left_out, _unrecorded(run)) if text),
        width=max((b.x + WIDE for b in placed), default=0.0) + GAP,
        height=max((b.y + b.height for b in placed), default=0.0) + GAP / 2,
    )


def _title(now: Snapshot) -> str:
    if now.stall is not None:
        return "Who waits for whom"
    when = "when the first rank failed" if now.failed else "at the end of the records"
    return f"Who waited for whom {when}"


def _unrecorded(run: Run) -> str:
    return f"{ranks_text(run.missing)} left no record" if run.missing else ""


def _blamed(report: Report) -> Finding | None:
    """The finding that says who is at fault, where that is not everyone."""
    every = {r.rank for r in report.ranks}
    return next((f for f in report.findings if _blames(f, every)), None)


def _blames(finding: Finding, every: set[int]) -> bool:
    """Whether it is of the last attempt, ended that, and not all ranks are at fault."""
    ended = finding.severity is Severity.ERROR or finding.check == "stall"
    return (
        ended and finding.attempt is None and bool(finding.ranks) and not every <= {*finding.ranks}
    )


def _graph(now: Snapshot) -> dict[int, list[int]]:
    """Each waiting rank, and the ranks for which it waits: those that are not in its call, and
    those that make another call in its place. Asked once for the ranks of a call."""
    calls: dict[object, list[RankSnapshot]] = {}
    for stand in now.blocked:
        call, alone = stand.call, ("message", stand.rank.rank)
        key = (stand.key, call.index) if call is not None and call.index >= 0 else alone
        calls.setdefault(key, []).append(stand)
    found: dict[int, list[int]] = {}
    for stands in calls.values():
        absent = {other.rank.rank for other in awaited(now, stands[0])}
        whats: dict[object, list[int]] = {}
        for stand in stands:
            whats.setdefault(stand.made.what if stand.made else None, []).append(stand.rank.rank)
        for what, ranks in whats.items():
            unlike = (r for w, others in whats.items() if w != what for r in others)
            whom = sorted({*absent, *unlike})
            found.update(dict.fromkeys(ranks, whom) if whom else {})
    return found


class _Drawn:
    """The boxes, those at fault and the largest first, and the edges between them."""

    def __init__(
        self, now: Snapshot, waits: Mapping[int, list[int]], blamed: Finding | None
    ) -> None:
        self._now, self._waits, self._blamed = now, waits, blamed
        self._fault = frozenset(blamed.ranks) if blamed else frozenset()
        groups: dict[object, list[RankSnapshot]] = {}
        for stand in now.by_rank.values():
            groups.setdefault(self._key(stand), []).append(stand)
        boxes = [self._box(stands) for stands in groups.values()]
        boxes.sort(key=lambda b: (not b.fault, -len(b.ranks), b.ranks))
        self.boxes = boxes
        of = {rank: n for n, box in enumerate(boxes) for rank in box.ranks}
        self.edges = {
            n: sorted({of[t] for r in box.ranks for t in waits.get(r, ()) if t in of} - {n})
            for n, box in enumerate(boxes)
        }

    @cached_property
    def told(self) -> list[str]:
        return [self._told(n) for n in range(min(len(self.boxes), MOST_BOXES))]

    def _key(self, stand: RankSnapshot) -> object:
        """What ranks of one box have in common; in a message, also with whom."""
        rank = stand.rank.rank
        message = stand.call is not None and stand.call.index < 0
        awaited = tuple(self._waits.get(rank, ())) if message else stand.key
        now = self._now
        return _stack(now, stand), _doing(now, stand), awaited, rank in self._fault

    def _box(self, stands: list[RankSnapshot]) -> Box:
        one = stands[0]
        ranks = tuple(sorted(s.rank.rank for s in stands))
        waits = any(r in self._waits for r in ranks)
        seconds = self._now.waited(stands)
        doing = _doing(self._now, one)
        if not one.gone and seconds >= 1:
            doing += f", for {duration(seconds)}"
        stack = _stack(self._now, one) or self._line_of_the_fault(ranks)
        lines = [Text(cut(doing, CHARACTERS), "doing")]
        if stack:
            lines.append(Text(cut(_place(stack[0]), CHARACTERS), "place"))
            if stack[0].source.strip():
                lines.append(Text(cut(clean(stack[0].source).strip(), CODE_CHARACTERS), "code"))
        callers = stack[1 : CALLERS + 1]
        lines += [Text(cut(f"called from {_place(p)}", CHARACTERS), "caller") for p in callers]
        return Box(
            ranks=ranks,
            title=cut(ranks_text(ranks), 30),
            lines=tuple(lines),
            told=doing,
            stack=tuple(_place(place) for place in stack),
            fault=ranks[0] in self._fault,
            waits=waits,
            seconds=seconds,
        )

    def _line_of_the_fault(self, ranks: tuple[int, ...]) -> tuple[Location, ...]:
        """Where there is no stack, since the rank is gone: the line that the finding points to."""
        spot = self._blamed.location if self._blamed and ranks[0] in self._fault else None
        return (spot,) if spot else ()

    def _told(self, number: int) -> str:
        box = self.boxes[number]
        said = f"{ranks_text(box.ranks)}{' (at fault)' if box.fault else ''}: {box.told}"
        if targets := self.edges[number]:
            ranks = [r for t in targets for r in self.boxes[t].ranks]
            said += f"; {'waits' if len(box.ranks) == 1 else 'wait'} for {ranks_text(ranks)}"
        return said


def _doing(now: Snapshot, stand: RankSnapshot) -> str:
    """What a rank was doing, without its line."""
    failed, rank = _failed(now, stand), stand.rank
    if stand.gone and now.stall is None and rank.signal:
        return f"was ended by {rank.signal}"
    if stand.gone:
        leaving = rank.latest(RankExiting)
        left = f"has left ({leaving.how})" if leaving else "gone"
        return clean(f"gone: {failed.text}" if failed else left, 200)
    if stand.stopped:
        return "stopped by a signal"
    if stand.made is not None:
        op = stand.made.signature.op
        return clean(f"waits on its device for {op}" if stand.on_device else f"in {op}", 80)
    if failed is not None:
        return clean(f"fails: {failed.text}", 200)
    if stand.unknown:
        return "its calls are not on record"
    return DOING.get(stand.phase, "") if stand.phase is not None else "in no recorded call"


def _failed(now: Snapshot, stand: RankSnapshot) -> Failure | None:
    """How a rank failed by itself, where that is what the moment is of."""
    found = failure(stand.rank) if now.stall is None else None
    return found if found is not None and found.kind in ("exception", "exit") else None


def _stack(now: Snapshot, stand: RankSnapshot) -> tuple[Location, ...]:
    """The lines of the user's code, innermost first; one where no stack is on record."""
    rank = stand.rank
    if stand.made is None and (failed := _failed(now, stand)) is not None:
        return (failed.location,) if failed.location else ()
    frames = stand.stood.frames if stand.stood else ()
    users = [
        Location(shorten(f.file, rank.cwd), f.line, f.function, f.text) for f in frames if f.user
    ]
    if users:
        return tuple(users)
    return (stand.location,) if stand.location and not stand.gone else ()


def _place(place: Location) -> str:
    where = clean(place)
    named = place.function not in ("", "<module>")
    return f"{where} in {clean(place.function, 60)}" if named else where


def _placed(boxes: list[Box], edges: Mapping[int, list[int]]) -> list[Box]:
    """Each row of boxes above those that its boxes wait for."""
    depth: dict[int, int] = {}

    def measure(number: int, above: frozenset[int]) -> int:
        if number not in depth:
            further = [t for t in edges[number] if t < len(boxes) and t not in above]
            deepest = (measure(t, above | {number}) + 1 for t in further)
            depth[number] = max(deepest, default=0)
        return depth[number]

    for number in range(len(boxes)):
        measure(number, frozenset())
    rows: dict[int, list[int]] = {}
    for number, level in depth.items():
        rows.setdefault(-level, []).append(number)
    lines = [
        sorted(rows[level])[at : at + IN_A_ROW]
        for level in sorted(rows)
        for at in range(0, len(rows[level]), IN_A_ROW)
    ]
    wide = max((len(line) for line in lines), default=0) * (WIDE + GAP) + GAP
    placed: dict[int, Box] = {}
    y = GAP / 2
    for line in lines:
        x = (wide - len(line) * (WIDE + GAP) + GAP) / 2
        for number in line:
            placed[number] = replace(boxes[number], x=x, y=y)
            x += WIDE + GAP
        y += max(placed[n].height for n in line) + BETWEEN
    return [placed[n] for n in range(len(boxes))]


def _arrows(boxes: list[Box], edges: Mapping[int, list[int]]) -> Iterable[Arrow]:
    """Down to a box that is waited for; up again, beside the others, in a circle."""
    ways = [
        (number, target)
        for number in range(len(boxes))
        for target in edges[number]
        if target < len(boxes)
    ]
    for way in ways:
        begin, end = (_port(boxes, ways, way, number) for number in way)
        yield _arrow(boxes[way[0]], boxes[way[1]], begin, end)


def _port(
    boxes: list[Box], ways: list[tuple[int, int]], way: tuple[int, int], number: int
) -> float:
    """Where an arrow leaves or meets box `number`: along its upper or its lower edge the arrows are
    equally far from each other, in the order of the boxes at their other ends."""
    own = boxes[number]

    def side(one: tuple[int, int]) -> tuple[bool, Box]:
        other = boxes[one[0] if one[1] == number else one[1]]
        return other.y > own.y, other

    here = [one for one in ways if number in one and side(one)[0] == side(way)[0]]
    here.sort(key=lambda one: (side(one)[1].x, one[0] > one[1]))
    return own.x + WIDE * (here.index(way) + 1) / (len(here) + 1)


def _arrow(box: Box, other: Box, begin: float, end: float) -> Arrow:
    """An arrow with its words near the box that waits; `begin` and `end` as of `_port`."""
    said = "wait for" if len(box.ranks) > 1 else "waits for"
    said = cut(f"{said} {ranks_text(other.ranks)}", 40)
    if other.y == box.y:
        right = other.x > box.x
        x1, y1 = box.x + (WIDE if right else 0), box.y + box.height / 2
        x2, y2 = other.x + (0 if right else WIDE), other.y + other.height / 2
        path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f} "
        return Arrow(f"{path}{x2:.0f} {y2:.0f}", said, (x1 + x2) / 2 + 8, (y1 + y2) / 2 + 4)
    down = other.y > box.y
    x1, y1 = begin, box.y + (box.height if down else 0)
    x2, y2 = end, other.y + (0 if down else other.height)
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} "
    at_x, at_y = x1 + 0.22 * (x2 - x1), y1 + 0.34 * (y2 - y1)  # three tenths of the way
    return Arrow(f"{path}{x2:.0f} {y2:.0f}", said, at_x + 8, at_y + 4)
