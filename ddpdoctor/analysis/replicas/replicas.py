"""Which ranks hold copies of the same model, and where the digests of these copies diverge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import msgspec

from ...events import (
    Digests,
    Event,
    Replica,
    ShardedModel,
    StepDone,
    Wrapped,
)
from ...events.drift import ABSENT, UNEVEN_STEPS, UNHELD, chosen
from ...events.pack import unpack
from ...report.findings import Finding
from ...report.merging import merged
from ...run import Location, Run, counted, equal_ranks, odd_ones, some
from . import evaluations
from .evaluations import Row
from .group_findings import united
from .majority import Split, settles
from .missed_backwards import MissedBackwards
from .replica import Member, equal_inputs

NO_COPIES = "no two ranks train copies of the same wrapped model, as far as was seen"


@dataclass(frozen=True)
class Replicas:
    """The copies of one model, as one optimizer trains it.

    Attributes:
        members: by global rank.
        left_out: why these copies are not compared; empty where they are.
    """

    members: dict[int, Member]
    left_out: str = ""

    @property
    def joined(self) -> bool:
        """Whether torch's `Join` makes the copies equal at its end, whatever set them apart."""
        return any(m.seen.left_out == UNEVEN_STEPS for m in self.members.values())

    @property
    def any(self) -> Member:
        return next(iter(self.members.values()))

    def line(
        self, kind: type[Event], ranks: Iterable[int] = (), /, **fields: object
    ) -> Location | None:
        """The first known line in events about these copies, those of `ranks` first."""
        order = [n for n in (*ranks, *self.members) if n in self.members]
        spots = (self.members[n].line(kind, **fields) for n in dict.fromkeys(order))
        return next((spot for spot in spots if spot is not None), None)

    @property
    def size(self) -> int:
        """How many elements the parameters have, all together."""
        every = self.any.wrapped.parameters
        return sum(prod(every[p].shape) for p in unpack(self.any.seen.parameters))

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of a kind, in the order of their digests."""
        wrapped = self.any.wrapped
        if kind == "buffers":
            return [b.name for b in wrapped.buffers]
        return [wrapped.parameters[p].name for p in unpack(self.any.seen.parameters)]


@dataclass
class Divergence:
    """Where copies differ.

    Attributes:
        kind: of the digests: `parameters`, `gradients`, `local`, `buffers`, `state:<name>`.
        point: when they were taken: `step`, `eval`, `again`, `part`, `kept` or `end`.
        keys: the moments at which the copies differ, ascending.
        compared: how many moments from the first on compared a tensor that differs.
        names: of the tensors that differ.
        total: how many tensors there are.
        looked: how many of them were compared from the first moment on; where some were equal
            again in between, at `keys`.
        minority: ranks that differ from most others; all ranks where there is no majority.
        split: the ranks in groups that agree, the largest first.
        uncompared: ranks that did not look at what differs first, of a `step`.
        grouped_by: the later comparison that tells the `split`, where the first one cannot; empty
            where it can.
        at: wall clock of the first moment, on the last rank where it is not that of a step.
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
    grouped_by: str = ""
    at: float = 0.0
    healed: int = -1
    before: int = -1

    @property
    def first(self) -> int:
        return self.keys[0]

    @property
    def unseen(self) -> range:
        """The steps after the last one at which the copies were equal, up to the first one at
        which they differ: the divergence may have begun in any of them."""
        known = self.point == "step" and self.before >= 0
        return range(self.before + 1, self.first if known else self.before + 1)


Reported = tuple[Replicas, Finding]
"""A finding, and the copies that it is about."""


def needs_copies(run: Run) -> str | None:
    """For checks that compare copies of a model."""
    return None if replicas(run) else NO_COPIES


def replicas(run: Run, *, unheld: bool = False) -> list[Replicas]:
    """Every model and optimizer of which two ranks or more hold copies.

    Args:
        unheld: include models that are trained although no optimizer holds them.
    """
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


def sharded_models(run: Run) -> list[Replicas]:
    """Every model whose parameters are sharded, and over whose ranks gradients are averaged, as if
    each rank held a copy; without digests."""
    found: dict[tuple[tuple[int, ...], int], dict[int, Member]] = {}
    for number, rank in run.ranks.items():
        taken = Counter({e.optimizer: e.step for e in rank.of(StepDone)})
        optimizer = max(taken, key=lambda o: taken[o], default=-1)
        for event in rank.of(ShardedModel):
            seen = Replica(
                at=event.at,
                model=event.model,
                optimizer=optimizer,
                ranks=event.ranks,
                parameters="",
            )
            wrapped = Wrapped(
                at=event.at,
                model=event.model,
                wrapper=event.wrapper,
                kind=event.kind,
                group=-1,
                site=event.site,
            )
            if number in event.ranks:
                found.setdefault((event.ranks, event.model), {})[number] = Member(
                    rank, seen, wrapped
                )
    return [Replicas(members) for members in found.values() if len(members) > 1]


def each_model(
    run: Run, judge: Callable[[Run, Replicas], Iterable[Finding]], *, unheld: bool = False
) -> Iterator[Finding]:
    """The findings of `judge`, one for each model whatever the number of its optimizers.

    Models that one line wraps become one finding where the findings point at one line, and so do
    groups of ranks.
    """
    by_model: dict[object, list[Reported]] = {}
    for group in replicas(run, unheld=unheld):
        mine = by_model.setdefault((group.any.model, tuple(group.members)), [])
        mine += [(group, finding) for finding in judge(run, group)]
    together: dict[object, list[Reported]] = {}
    for model, reported in by_model.items():
        if reported:
            group, first = reported[0][0], _joined(reported)
            wrapped = group.any.rank.location(group.any.wrapped.site)
            place = (wrapped, first.location, first.severity, tuple(group.members))
            together.setdefault(place if wrapped else model, []).append((group, first))
    yield from united((tuple(t[0][0].members), _of_models(t)) for t in together.values())


def _joined(reported: Sequence[Reported]) -> Finding:
    """The worst finding, of these the first, with the ranks, subjects and optimizers of all."""
    findings = sorted((f for _, f in reported), key=lambda f: (f.severity.rank, f.at))
    numbers = {n for group, f in reported for n in (*f.optimizers, group.any.optimizer)}
    held = tuple(sorted(numbers - {UNHELD}))
    return msgspec.structs.replace(merged(findings), optimizers=held)


def _of_models(reported: Sequence[Reported]) -> Finding:
    """One finding for models that one line wraps."""
    finding, more = _joined(reported), len(reported) - 1
    if not more:
        return finding
    rows = [
        {"model": group.any.wrapped.kind, "tensors": some(f.subjects, 4)} for group, f in reported
    ]
    note = f"the same holds for {counted(more, 'more model')} wrapped at this line"
    return merged([finding], note, {"models": rows})


def _alike(members: dict[int, Member]) -> Replicas | None:
    """The largest set of ranks that hold the same tensors; None where fewer than two do.

    Others cannot be compared, and are reported by another check (`model-mismatch`).
    """
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
    if left_out == UNEVEN_STEPS and equal_inputs(members.values()):
        left_out = ""
    return Replicas({n: members[n] for n in ranks}, left_out)


def divergence(
    group: Replicas, kind: str, point: str = "step", *, among: Container[int] | None = None
) -> Divergence | None:
    """Where the copies differ in digests of a kind; None where they never do.

    Args:
        point: the moments to compare, see `Divergence.point`.
        among: only these moments.
    """
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
    if found.healed < found.first or group.joined:
        found.healed = -1
    return found


def _moments(
    group: Replicas, kind: str, point: str, among: Container[int] | None = None
) -> Iterator[tuple[int, dict[int, Row], list[int]]]:
    """The moments that at least two ranks looked at: their rows, and the positions that differ."""
    tables = by_rank(group, kind, point)
    count = len(group.names("buffers" if kind == "buffers" else "parameters"))
    for key in sorted({k for table in tables.values() for k in table}):
        rows = {n: table[key] for n, table in tables.items() if key in table}
        if len(rows) < 2 or (among is not None and key not in among):
            continue
        if point in ("step", "kept") and len({made for _, _, made in rows.values()}) > 1:
            return  # no longer the same step: see `skipped_steps`
        parts = kind.startswith("state:") or point == "part"
        yield key, rows, _differing(rows, key, count, parts=parts)


def _divide(group: Replicas, found: Divergence, sides: Mapping[int, Split]) -> None:
    """Find out who differs from whom: by the first comparison, or if too few ranks were part of
    it by a later one."""
    found.split = sides[found.first]
    if found.point == "step":
        compared = {n for side in found.split for n in side}
        found.uncompared = tuple(sorted(group.members.keys() - compared))
    if found.uncompared and 2 * len(found.split[0]) <= len(group.members):
        what = found.kind.replace(":", " ")
        later = {f"{what} at step {k}": s for k, s in sides.items() if k != found.first}
        if found.kind != "buffers":
            later |= _of_parameters(group, found)
        found.grouped_by = settles(found.split, later, len(group.members))
        found.split = later.get(found.grouped_by, found.split)
    found.minority = odd_ones(found.split)


def _of_parameters(group: Replicas, found: Divergence) -> Iterator[tuple[str, Split]]:
    """How the parameters of the same names divide the ranks after the first comparison."""
    names = group.names("parameters")
    same = {names.index(name) for name in found.names}
    for point in ("step", "end"):
        for key, rows, differing in _moments(group, "parameters", point):
            if key > found.first and (apart := [p for p in differing if p in same]):
                when = f"at step {key}" if point == "step" else "at the end"
                yield f"parameters {when}", _split(rows, key, len(names), apart)


def lacking(group: Replicas, found: Divergence, what: int = ABSENT) -> tuple[int, ...]:
    """The ranks that have none of the tensors that differ first, or only zeros in them, where the
    others have all of them and agree.

    Args:
        what: `ABSENT` or `ZERO`.
    """
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
    """Whether these buffers had the same values at all moments, at least two, on every rank."""
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
    """Whether two ranks have digests of a common moment, of tensors that could be read."""
    keys = [
        {key for key, (_, values, _) in _rows(m, kind, point).items() if any(values)}
        for m in group.members.values()
    ]
    return any(a & b for a, b in pairwise(keys))


def kinds(group: Replicas, prefix: str) -> list[str]:
    """The kinds of digests that begin with `prefix`, sorted."""
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
    """The rows of every rank by moment. A synchronised backward that a rank is known to have
    missed before a step counts as if the rank had run it."""
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
    """By step, the digests by position, and the synchronised backwards until then."""
    rows = _rows(member, kind, "step")
    return {key: (_by_position(row, key, count), row[2]) for key, row in rows.items()}


def _wall(member: Member, kind: str, point: str, key: int) -> float:
    for event in _events(member, kind, point):
        if key in event.keys:
            return member.rank.wall(event.at)
    return float("inf")


def _differing(rows: dict[int, Row], key: int, count: int, *, parts: bool) -> list[int]:
    """Positions that every rank of the moment looked at and that are not equal on all.

    Args:
        parts: a rank need not hold all tensors: one that it lacks is no different value.
    """
    if len(set(rows.values())) == 1:
        return []
    found = []
    tables = [_by_position(row, key, count) for row in rows.values()]
    for position in set.intersection(*(set(t) for t in tables)):
        values = {table[position] for table in tables}
        if len(values - {ABSENT} if parts else values) > 1:
            found.append(position)
    return sorted(found)


def _by_position(row: Row, key: int, count: int) -> dict[int, int]:
    stride, values, _ = row
    return dict(zip(chosen(key, max(1, stride), count), values, strict=False))


def _split(rows: dict[int, Row], key: int, count: int, differing: list[int]) -> Split:
    """The ranks in groups that agree at these positions, the largest first."""
    tables = {number: _by_position(row, key, count) for number, row in rows.items()}
    return equal_ranks({n: tuple(table[p] for p in differing) for n, table in tables.items()})


def by_module(names: Iterable[str]) -> dict[str, int]:
    """How many of the tensors each module owns."""
    return dict(Counter(name.rpartition(".")[0] or "(root)" for name in names))
