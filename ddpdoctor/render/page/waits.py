"""The picture of a run that stood still: where its ranks stood, and who waited for whom.

Ranks with the same stack, or in the same call, share a box. The boxes stand below each other, those
that wait above those they wait for, so that who holds up all others stands last. The arrows run
beside them, where no text is. The picture is made twice: for a screen, and for a phone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ...analysis.waiting.failures import Failure, failure
from ...analysis.waiting.snapshot import DOING, RankSnapshot, Snapshot, snapshot_of
from ...analysis.waiting.wait_graph import awaited
from ...events import RankExiting
from ...report.findings import Finding, Report, Severity
from ...run import Location, Run, counted, ranks_text, shorten
from ..safe_text import clean, cut, duration, wrap

MOST_BOXES = 12
CALLERS = 3
"""Lines of the stack shown beside the one where the ranks stand."""

LINE, BETWEEN, MARGIN = 20, 26, 4
"""Pixels: of a line of text, between two boxes, around the picture."""

TITLE_PIXELS, TAG_PIXELS = 9.5, 70
"""A character of a title at most, and what the word beside it takes."""


@dataclass(frozen=True)
class Form:
    """How a picture is made.

    Attributes:
        wide: a box, in pixels; characters, code_characters: that fit into it.
        beside, apart: pixels between the boxes and the arrows, and between two arrows, which take
            `most` pixels together.
    """

    name: str
    wide: int
    characters: int
    code_characters: int
    beside: int
    apart: int
    most: int


FORMS = (Form("large", 600, 76, 70, 22, 16, 160), Form("small", 284, 34, 31, 14, 10, 50))


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
        told: where they stood, in words; stack: of the user's code, innermost first; code: the
            line in which they stood.
        whom: `wait for rank 1`; empty where that is not known.
    """

    ranks: tuple[int, ...]
    told: str
    stack: tuple[str, ...]
    code: str
    fault: bool
    waits: bool
    whom: str = ""
    title: str = ""
    lines: tuple[Text, ...] = ()
    y: float = 0.0

    @property
    def height(self) -> float:
        return LINE * (len(self.lines) + 2)


@dataclass(frozen=True)
class Arrow:
    """From a box that waits to one it waits for, as a path; `fault` where that is at fault."""

    path: str
    said: str
    fault: bool


@dataclass(frozen=True)
class Drawing:
    """Boxes and arrows, placed; the boxes in the order of the text, not of their places."""

    form: Form
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    width: float
    height: float


@dataclass(frozen=True)
class Picture:
    """The same for every screen.

    Attributes:
        title: what is shown; told: the same in a sentence for each box; more: what is not shown.
    """

    title: str
    drawings: tuple[Drawing, ...]
    told: tuple[str, ...]
    more: str

    @property
    def boxes(self) -> tuple[Box, ...]:
        return self.drawings[0].boxes


def picture(report: Report, run: Run) -> Picture | None:
    """The picture; None where nothing stood still and no rank waited for another one."""
    now = snapshot_of(run)
    waits = _graph(now)
    if report.run.outcome == "completed" or not (waits or now.stall):
        return None
    drawn = _Drawn(now, waits, _blamed(report))
    more = drawn.boxes[MOST_BOXES:]
    left_out = f"{counted(len(more), 'more group')} of ranks are not drawn" if more else ""
    blame = "" if any(b.fault for b in drawn.boxes) else "No finding blames one of them alone"
    return Picture(
        title=_title(now),
        drawings=tuple(_drawing(form, drawn.boxes[:MOST_BOXES], drawn.edges) for form in FORMS),
        told=tuple(drawn.told),
        more=". ".join(text for text in (blame, left_out, _unrecorded(run)) if text),
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
        boxes = [self._box(stands) for stands in self._joined(groups)]
        boxes.sort(key=lambda b: (not b.fault, -len(b.ranks), b.ranks))
        of = {rank: n for n, box in enumerate(boxes) for rank in box.ranks}
        self.edges = {
            n: sorted({of[t] for r in box.ranks for t in waits.get(r, ()) if t in of} - {n})
            for n, box in enumerate(boxes)
        }
        self.boxes = [replace(box, whom=self._whom(boxes, n)) for n, box in enumerate(boxes)]

    @cached_property
    def told(self) -> list[str]:
        return [self._told(n) for n in range(min(len(self.boxes), MOST_BOXES))]

    def _key(self, stand: RankSnapshot) -> tuple[object, ...]:
        """What ranks of one box have in common; in a message, also with whom."""
        rank = stand.rank.rank
        message = stand.call is not None and stand.call.index < 0
        awaited = tuple(self._waits.get(rank, ())) if message else stand.key
        now = self._now
        return _stack(now, stand), _doing(now, stand), awaited, rank in self._fault

    def _joined(self, groups: dict[object, list[RankSnapshot]]) -> Iterator[list[RankSnapshot]]:
        """The groups; a rank of which only the line of its call is on record, not what called that,
        stands with the ranks in the same call at that line."""
        whole: dict[object, list[RankSnapshot]] = {}
        alone = []
        for stands in groups.values():
            stack, *rest = self._key(stands[0])
            assert isinstance(stack, tuple)
            key = (stack[0].file, stack[0].line, *rest) if stack and stands[0].made else None
            if key is not None and len(stack) == 1:
                alone.append((key, stands))
                continue
            if key is not None and len(stands) > len(whole.get(key, ())):
                whole[key] = stands
        for key, stands in alone:
            if key in whole:
                whole[key] += stands
        joined = {id(stands) for key, stands in alone if key in whole}
        return (stands for stands in groups.values() if id(stands) not in joined)

    def _box(self, stands: list[RankSnapshot]) -> Box:
        one = stands[0]
        ranks = tuple(sorted(s.rank.rank for s in stands))
        seconds = self._now.waited(stands)
        doing = _doing(self._now, one)
        if not one.gone and seconds >= 1:
            doing += f", for {duration(seconds)}"
        stack = _stack(self._now, one) or self._line_of_the_fault(ranks)
        return Box(
            ranks=ranks,
            told=doing,
            stack=tuple(_place(place) for place in stack),
            code=clean(stack[0].source).strip() if stack else "",
            fault=ranks[0] in self._fault,
            waits=any(r in self._waits for r in ranks),
        )

    def _line_of_the_fault(self, ranks: tuple[int, ...]) -> tuple[Location, ...]:
        """Where there is no stack, since the rank is gone: the line that the finding points to."""
        spot = self._blamed.location if self._blamed and ranks[0] in self._fault else None
        return (spot,) if spot else ()

    def _whom(self, boxes: list[Box], number: int) -> str:
        targets = [r for t in self.edges[number] for r in boxes[t].ranks]
        verb = "waits" if len(boxes[number].ranks) == 1 else "wait"
        return f"{verb} for {ranks_text(targets)}" if targets else ""

    def _told(self, number: int) -> str:
        box = self.boxes[number]
        said = f"{ranks_text(box.ranks)}{' (at fault)' if box.fault else ''}: {box.told}"
        return f"{said}; {box.whom}" if box.whom else said


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


def _drawing(form: Form, boxes: list[Box], edges: Mapping[int, list[int]]) -> Drawing:
    """Each box above those for which it waits, and the arrows at their right."""
    placed: dict[int, Box] = {}
    y = float(MARGIN)
    for number in _in_order(len(boxes), edges):
        box = replace(boxes[number], lines=tuple(_lines(boxes[number], form)), y=y)
        fits = int((form.wide - 28 - TAG_PIXELS) / TITLE_PIXELS)
        placed[number] = replace(box, title=cut(ranks_text(box.ranks), fits))
        y += box.height + BETWEEN
    found = [placed[n] for n in range(len(boxes))]
    arrows, beside = _arrows(form, found, edges)
    width = MARGIN + form.wide + beside + MARGIN
    return Drawing(form, tuple(found), tuple(arrows), width, y - BETWEEN + MARGIN)


def _lines(box: Box, form: Form) -> Iterator[Text]:
    first, *rest = wrap(box.told, form.characters) or [""]
    for text in (first, " ".join(rest)) if rest else (first,):
        yield Text(cut(text, form.characters), "doing")
    if box.whom:
        yield Text(cut(box.whom, form.characters), "whom")
    for number, place in enumerate(box.stack[: CALLERS + 1]):
        kind, text = ("caller", f"called from {place}") if number else ("place", place)
        yield Text(cut(text, form.characters), kind)
        if not number and box.code:
            yield Text(cut(box.code, form.code_characters), "code")


def _in_order(count: int, edges: Mapping[int, list[int]]) -> list[int]:
    """Who waits before those it waits for; in a circle the first of it stands as if it did not."""
    depth: dict[int, int] = {}

    def measure(number: int, above: frozenset[int]) -> int:
        if number not in depth:
            further = [t for t in edges[number] if t < count and t not in above]
            deepest = (measure(t, above | {number}) + 1 for t in further)
            depth[number] = max(deepest, default=0)
        return depth[number]

    for number in range(count):
        measure(number, frozenset())
    return sorted(depth, key=lambda number: (-depth[number], number))


def _arrows(
    form: Form, boxes: list[Box], edges: Mapping[int, list[int]]
) -> tuple[list[Arrow], float]:
    """Out of the right edge of a box that waits, up or down beside the boxes, and in again; and the
    pixels that they take there. All that lead to one box run in one line."""
    ways = [(n, t) for n in range(len(boxes)) for t in edges[n] if t < len(boxes)]
    if not ways:
        return [], 0.0
    reach = {
        target: max(abs(boxes[n].y - boxes[t].y) for n, t in ways if t == target)
        for target in {t for _, t in ways}
    }
    targets = sorted(reach, key=lambda target: (reach[target], target))
    apart = min(form.apart, form.most / len(targets))
    edge = MARGIN + form.wide
    lane = {t: edge + form.beside + apart * n for n, t in enumerate(targets)}
    arrows = []
    for number, target in ways:
        y1 = _port(boxes, ways, number, target)
        y2 = _port(boxes, ways, target, target)
        path = f"M{edge} {y1:.0f}H{lane[target]:.0f}V{y2:.0f}H{edge}"
        one, other = boxes[number], boxes[target]
        verb = "waits" if len(one.ranks) == 1 else "wait"
        said = f"{ranks_text(one.ranks)} {verb} for {ranks_text(other.ranks)}"
        arrows.append(Arrow(path, cut(said, 80), other.fault))
    return arrows, form.beside + apart * (len(targets) - 1) + MARGIN


def _port(boxes: list[Box], ways: list[tuple[int, int]], number: int, target: int) -> float:
    """Where the arrow from box `number` to `target` leaves it; where they are the same, all arrows
    to it come in. Along an edge they are equally far apart, in the order of their other ends."""
    own = boxes[number]
    ends = {t for n, t in ways if n == number} | {n for _, n in ways if n == number}
    order = sorted(ends, key=lambda end: boxes[end].y)
    return own.y + own.height * (order.index(target) + 1) / (len(order) + 1)
