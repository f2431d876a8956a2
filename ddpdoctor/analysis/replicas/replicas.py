"""Which ranks hold equal copies of what, and where their digests part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import msgspec

from ...events import Digests, Loaded, Replica, Wrapped
from ...events.drift import UNHELD, chosen
from ...events.pack import unpack
from ...report.findings import Finding
from ...run import Run, equal_ranks, odd_ones
from . import evaluations
from .evaluations import Row
from .group_findings import united
from .majority import Split, settles
from .missed_backwards import MissedBackwards
from .replica import Member

ABSENT = 0
ZERO = 1
"""Digests of no tensor, and of one in which nothing but zeros is."""

NO_COPIES = "no two ranks were seen to train copies of one wrapped model"


@dataclass(frozen=True)
class Replicas:
    """The copies of one model, as one optimizer trains it. `members` by global rank."""

    members: dict[int, Member]
    left_out: str = ""

    @property
    def any(self) -> Member:
        return next(iter(self.members.values()))

    @property
    def size(self) -> int:
        """Elements of the parameters."""
        every = self.any.wrapped.parameters
        return sum(prod(every[p].shape) for p in unpack(self.any.seen.parameters))

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of a kind, in the order that digests count."""
        wrapped = self.any.wrapped
        if kind == "buffers":
            return [b.name for b in wrapped.buffers]
        return [wrapped.parameters[p].name for p in unpack(self.any.seen.parameters)]


@dataclass
class Divergence:
    """Where copies differ.

    Attributes:
        keys: the moments at which they do, ascending; `compared` of those from the first on, of
            any tensor that does.
        names: of the tensors that differ; `looked` of the `total` were compared while they did,
            that is from then on, or where some of them were equal again meanwhile, at `keys`.
        minority: ranks that differ from most others; all ranks where there is no majority.
        uncompared: ranks that did not look at what differs at first, of a `step`.
        told: the look that tells the `split`, where the first one cannot; empty if it does.
        at: wall clock of the first moment, on the last rank where it is none of a step.
        healed: a later moment at which all tensors were equal again, -1 for none.
        before: the last moment at which they were still equal, as far as they were compared
            then; -1 for none.
    """

    kind: str
    point: str
    keys: list[int]
    compared: int = 0
    names: list[str] = field(default_factory=list)
    total: int = 0
    looked: int = 0
    minority: tuple[int, ...] = ()
    split: Split = field(default_factory=list)
    uncompared: tuple[int, ...] = ()
    reported: str = ""
    at: float = 0.0
    healed: int = -1
    before: int = -1

    @property
    def first(self) -> int:
        return self.keys[0]

    @property
    def unseen(self) -> range:
        """The steps between the last one at which they were equal and the first at which they
        were not: it may have begun in any of them."""
        known = self.point == "step" and self.before >= 0
        return range(self.before + 1, self.first if known else self.before + 1)


Told = tuple[Replicas, Finding]
"""A finding, and whose copies it is about."""


def replicas(run: Run, *, unheld: bool = False) -> list[Replicas]:
    """Every model and optimizer that two ranks or more hold in equal copies; `unheld`: and the
    models that are trained although no optimizer holds them."""
    found: dict[tuple[tuple[int, ...], int, int], dict[int, Member]] = {}
    for rank in run.ranks.values():
        wrapped = {w.model: w for w in rank.of(Wrapped)}
        latest = {(e.model, e.optimizer): e for e in rank.of(Replica)}
        order: Counter[tuple[int, ...]] = Counter()
        models: dict[int, int] = {}
        optimizers: Counter[int] = Counter()
        for (model, _), seen in sorted(latest.items()):
            if seen.optimizer == UNHELD and not unheld:
                continue
            if model not in models:
                models[model] = order[seen.ranks]
                order[seen.ranks] += 1
            if rank.rank in seen.ranks and model in wrapped:
                own = UNHELD if seen.optimizer == UNHELD else optimizers[model]
                key = (seen.ranks, models[model], own)
                found.setdefault(key, {})[rank.rank] = Member(rank, seen, wrapped[model])
            optimizers[model] += seen.optimizer != UNHELD
    return [r for members in found.values() if (r := _alike(members)) is not None]


def each_model(
    run: Run, judge: Callable[[Run, Replicas], Iterable[Finding]], *, unheld: bool = False
) -> Iterator[Finding]:
    """What `judge` says of every model, whichever of its optimizers it says it of. Models that one
    line wraps, and of which it points at one line, are told together, and so are groups of ranks.
    """
    by_model: dict[object, list[Told]] = {}
    for group in replicas(run, unheld=unheld):
        mine = by_model.setdefault((group.any.model, tuple(group.members)), [])
        mine += [(group, finding) for finding in judge(run, group)]
    together: dict[object, list[Told]] = {}
    for model, reported in by_model.items():
        if reported:
            group, first = reported[0][0], _joined(reported)
            wrapped = group.any.rank.location(group.any.wrapped.site)
            place = (wrapped, first.location, first.severity, tuple(group.members))
            together.setdefault(place if wrapped else model, []).append((group, first))
    yield from united((tuple(t[0][0].members), _of_models(t)) for t in together.values())


def _joined(reported: Sequence[Told]) -> Finding:
    """The worst of them, the first in time, with the ranks, subjects and optimizers of all."""
    findings = sorted((f for _, f in reported), key=lambda f: (f.severity.rank, f.at))
    ranks = tuple(sorted({r for f in findings for r in f.ranks}))
    subjects = tuple(dict.fromkeys(s for f in findings for s in f.subjects))
    numbers = {n for group, f in reported for n in (*f.optimizers, group.any.optimizer)}
    held = tuple(sorted(numbers - {UNHELD}))
    return msgspec.structs.replace(findings[0], ranks=ranks, subjects=subjects, optimizers=held)


def _of_models(reported: Sequence[Told]) -> Finding:
    finding, more = _joined(reported), len(reported) - 1
    if not more:
        return finding
    rows = [
        {"model": group.any.wrapped.kind, "concerned": ", ".join(f.subjects[:4])}
        for group, f in reported
    ]
    return msgspec.structs.replace(
        finding,
        summary=f"{finding.summary}; and so with {more} more "
        f"{'model' if more == 1 else 'models'} that the same line wraps",
        evidence=finding.evidence | {"models": rows},
    )


def _alike(members: dict[int, Member]) -> Replicas | None:
    """Those that hold the same tensors: others cannot be compared, and are another check's."""
    looks = {
        n: (m.seen.parameters, tuple(p.look for p in m.wrapped.parameters))
        for n, m in members.items()
    }
    groups: list[tuple[object, list[int]]] = []
    for number, look in looks.items():
        same = next((ranks for other, ranks in groups if other == look), None)
        if same is None:
            groups.append((look, [number]))
        else:
            same.append(number)
    ranks = max((ranks for _, ranks in groups), key=len, default=[])
    if len(ranks) < 2:
        return None
    left_out = next((m.seen.left_out for m in members.values() if m.seen.left_out), "")
    return Replicas({n: members[n] for n in ranks}, left_out)


def divergence(
    group: Replicas, kind: str, point: str = "step", *, among: Container[int] | None = None
) -> Divergence | None:
    """How the copies differ in digests of a kind, or None where they never do; `among` these
    moments only."""
    names = group.names("buffers" if kind == "buffers" else "parameters")
    found = Divergence(kind, point, [], total=len(names))
    positions: set[int] = set()
    looked: dict[int, range] = {}
    sides: dict[int, Split] = {}
    for key, rows, differing in _moments(group, kind, point, among):
        looked[key] = chosen(key, max(1, *(stride for stride, _, _ in rows.values())), len(names))
        if differing:
            found.keys.append(key)
            sides[key] = _split(rows, key, len(names), differing)
            positions.update(differing)
        elif (
            found.keys and len(rows) == len(group.members) and {r[0] for r in rows.values()} == {1}
        ):
            found.healed = key
    if not found.keys:
        return None
    since = {key: seen for key, seen in looked.items() if key >= found.first}
    found.compared = sum(not positions.isdisjoint(seen) for seen in since.values())
    everything = set().union(*since.values())
    ended = found.compared > len(found.keys)
    found.looked = len(set().union(*(looked[k] for k in found.keys)) if ended else everything)
    sound = everything - positions  # what these were before says nothing of the others
    equal = (k for k in reversed(looked) if k < found.first and not sound.issuperset(looked[k]))
    found.before = next(equal, -1)
    found.names = [names[p] for p in sorted(positions)]
    _divide(group, found, sides)
    ranks = (n for side in sides[found.first] for n in side)
    walls = [_wall(group.members[n], kind, point, found.first) for n in ranks]
    # Between two steps a rank may be loaded while another is already evaluated.
    found.at = min(walls) if point == "step" else max(walls)
    if found.healed < found.first:
        found.healed = -1
    return found


def _moments(
    group: Replicas, kind: str, point: str, among: Container[int] | None = None
) -> Iterator[tuple[int, dict[int, Row], list[int]]]:
    """The moments that two ranks looked at or more: their rows, and the positions that differ."""
    tables = by_rank(group, kind, point)
    count = len(group.names("buffers" if kind == "buffers" else "parameters"))
    for key in sorted({k for table in tables.values() for k in table}):
        rows = {n: table[key] for n, table in tables.items() if key in table}
        if len(rows) < 2 or (among is not None and key not in among):
            continue
        if point in ("step", "kept") and len({made for _, _, made in rows.values()}) > 1:
            return  # not the same step any more: see `_skipped`
        parts = kind.startswith("state:") or point == "part"
        yield key, rows, _differing(rows, key, count, parts=parts)


def _divide(group: Replicas, found: Divergence, sides: Mapping[int, Split]) -> None:
    """Who differs from whom: as the first look tells, or where that compared too few, others."""
    found.split = sides[found.first]
    if found.point == "step":
        compared = {n for side in found.split for n in side}
        found.uncompared = tuple(sorted(group.members.keys() - compared))
    if found.uncompared and 2 * len(found.split[0]) <= len(group.members):
        what = found.kind.replace(":", " ")
        later = {f"{what} at step {k}": s for k, s in sides.items() if k != found.first}
        if found.kind != "buffers":
            later |= _of_parameters(group, found)
        found.reported = settles(found.split, later, len(group.members))
        found.split = later.get(found.reported, found.split)
    found.minority = odd_ones(found.split)


def _of_parameters(group: Replicas, found: Divergence) -> Iterator[tuple[str, Split]]:
    """How the parameters of the same names divide the ranks after the first look."""
    names = group.names("parameters")
    same = {names.index(name) for name in found.names}
    for point in ("step", "end"):
        for key, rows, differing in _moments(group, "parameters", point):
            if key > found.first and (apart := [p for p in differing if p in same]):
                when = f"at step {key}" if point == "step" else "at the end"
                yield f"parameters {when}", _split(rows, key, len(names), apart)


def lacking(group: Replicas, found: Divergence, what: int = ABSENT) -> tuple[int, ...]:
    """The ranks that have none of the tensors that differ at first, or only zeros in them, where
    the others have them all and agree on them."""
    count, key = found.total, found.first
    tables = by_rank(group, found.kind, found.point)
    rows = {n: table[key] for n, table in tables.items() if key in table}
    differing = _differing(rows, key, count, parts=False)
    known = {n: _by_position(row, key, count) for n, row in rows.items()}
    values = {n: tuple(table[p] for p in differing) for n, table in known.items()}
    none = tuple(sorted(n for n, mine in values.items() if set(mine) == {what}))
    rest = {mine for n, mine in values.items() if n not in none}
    return none if len(rest) == 1 and {ABSENT, what}.isdisjoint(next(iter(rest))) else ()


def never_change(group: Replicas, names: Iterable[str]) -> bool:
    """Whether these buffers were the same at all moments, two at least, on every rank."""
    every = group.names("buffers")
    wanted = [every.index(name) for name in names]
    for member in group.members.values():
        tables = [
            _by_position(row, key, len(every))
            for point in ("kept", "eval", "end")
            for key, row in _rows(member, "buffers", point).items()
        ]
        for position in wanted:
            seen = [table[position] for table in tables if position in table]
            if len(seen) < 2 or len(set(seen)) > 1:
                return False
    return True


def compared(group: Replicas, kind: str, point: str = "step") -> bool:
    """Whether two ranks have a moment in common."""
    keys = [set(_rows(m, kind, point)) for m in group.members.values()]
    return any(a & b for a, b in pairwise(keys))


def kinds(group: Replicas, prefix: str) -> list[str]:
    """Kinds of digests that begin with `prefix`."""
    found = {e.kind for m in group.members.values() for e in m.rank.of(Digests)}
    return sorted(k for k in found if k.startswith(prefix))


def _events(member: Member, kind: str, point: str) -> Iterator[Digests]:
    for event in member.rank.of(Digests):
        same = event.model == member.model and event.kind == kind and event.point == point
        evaluated = point in ("eval", "again", "part")
        if same and (evaluated or event.optimizer == member.optimizer):
            yield event


def _rows(member: Member, kind: str, point: str) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for event in _events(member, kind, point):
        values = unpack(event.values)
        begin = 0
        reported = event.backwards or (0,) * len(event.keys)
        moments = zip(event.keys, event.strides, event.counts, reported, strict=False)
        for key, stride, count, made in moments:
            mine = values[begin : begin + count]
            if kind == "parameters" and point in ("eval", "again"):  # those of the whole model
                mine = [mine[p] for p in unpack(member.seen.parameters) if p < count]
            rows[key] = stride, tuple(mine), made
            begin += count
    return rows


def by_rank(group: Replicas, kind: str, point: str) -> dict[int, dict[int, Row]]:
    """The rows of every rank by moment; a backward before a step that one is known to lack counts
    as if it had made it."""
    tables = {n: _rows(m, kind, point) for n, m in group.members.items()}
    if point in ("again", "part"):
        evaluations.together(tables)
    if point == "eval":
        evaluations.alone(tables, {n: _rows(m, kind, "again") for n, m in group.members.items()})
    lacking = MissedBackwards(group.members) if point == "step" else None
    if lacking:
        counted = {k for rows in tables.values() for k, (_, _, made) in rows.items() if made}
        for number, rows in tables.items():
            for key in counted & rows.keys():
                stride, values, made = rows[key]
                rows[key] = stride, values, made + lacking.at(number, key)
    return tables


def by_step(member: Member, kind: str, count: int) -> dict[int, tuple[dict[int, int], int]]:
    """By step, the digests by position and the averaging backwards until then."""
    rows = _rows(member, kind, "step")
    return {key: (_by_position(row, key, count), row[2]) for key, row in rows.items()}


def _wall(member: Member, kind: str, point: str, key: int) -> float:
    for event in _events(member, kind, point):
        if key in event.keys:
            return member.rank.wall(event.at)
    return float("inf")


def _differing(rows: dict[int, Row], key: int, count: int, *, parts: bool) -> list[int]:
    """Positions that every rank of the moment looked at and that are not equal on all. With
    `parts`, a rank need not hold all of it: what it has not is no other value."""
    if len(set(rows.values())) == 1:
        return []
    found = []
    tables = [_by_position(row, key, count) for row in rows.values()]
    for position in set.intersection(*(set(t) for t in tables)):
        values = {table[position] for table in tables}
        if len(values - {ABSENT} if parts else values) > 1:
            found.append(position)
    return sorted(found)


def divided(group: Replicas) -> str:
    """State of the optimizer that each rank holds for a part of the parameters only."""
    for kind in kinds(group, "state:"):
        tables = [_rows(m, kind, "step") for m in group.members.values()]
        for key in set.intersection(*(set(t) for t in tables)):
            rows = [table[key][1] for table in tables]
            lacking = {tuple(value == ABSENT for value in row) for row in rows}
            if all(ABSENT in row and any(row) for row in rows) and len(lacking) > 1:
                return kind.partition(":")[2]
    return ""


def _by_position(row: Row, key: int, count: int) -> dict[int, int]:
    stride, values, _ = row
    return dict(zip(chosen(key, max(1, stride), count), values, strict=False))


def _split(rows: dict[int, Row], key: int, count: int, differing: list[int]) -> Split:
    """The ranks in groups that agree, the largest first."""
    tables = {number: _by_position(row, key, count) for number, row in rows.items()}
    return equal_ranks({n: tuple(table[p] for p in differing) for n, table in tables.items()})


def by_module(names: Iterable[str]) -> dict[str, int]:
    """How many of the tensors each module owns."""
    return dict(Counter(name.rpartition(".")[0] or "(root)" for name in names))


def loads(group: Replicas, what: str) -> dict[int, list[Loaded]]:
    """By rank, the loads of the model or its optimizer."""
    return {
        n: found
        for n, m in group.members.items()
        if (found := [e for e in m.rank.of(Loaded) if e.model == m.model and e.what == what])
    }
