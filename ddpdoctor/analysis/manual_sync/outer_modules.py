"""Modules that no wrapper holds, take part in training, and are not equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from ...events import (
    EpochEnded,
    FileWritten,
    OuterDigests,
    OuterModule,
    OuterStateTaken,
    Place,
    Wrapped,
)
from ...events.drift import AT_END, AT_START
from ...events.pack import unpack
from ...report.findings import FixKind, Related, Severity, Steps
from ...run import Location, Rank, Run, odd_ones, plural, ranks_do, ranks_text, some
from ..calls.guards import Guard, guard
from ..replicas import causes
from ..replicas.majority import Split
from ..replicas.replicas import divergence, replicas
from .copies import same, trained_copies

RULE = "outside-the-wrapper"
RULES = {RULE: "a module outside of every wrapper takes part in training, and ranks differ in it"}

UPDATE = (
    "update buffers from values of all ranks: for running means and variances `dist.all_reduce` "
    "the count, the sum and the sum of squares of what goes into them, not the samples; gather "
    "what goes into a queue or a bank (`dist.all_gather`)"
)
"""How to make buffers equal that each rank writes to."""

SEND = (
    "send one rank's before they are evaluated or saved: "
    "`for b in module.buffers(): dist.broadcast(b, src=0)`"
)
"""How to make the buffers of a copy of the model equal."""

FEWEST_LOOKS = 3
"""Moments at which a module is the same on a rank that is said not to update it."""


@dataclass(frozen=True)
class Outer:
    """One module as all ranks of a model have it.

    Attributes:
        wrapped: when the model that is trained with it was wrapped; 0 for no wrapper.
        ranks, seen: by global rank, the rank and its record of the module.
        names: of the tensors that differ; `parameters` those of them that are no buffers.
        steps: at which they differ, `AT_START` first and `AT_END` last; `compared` at how many they
            were looked at from the first of them on.
        split: the ranks in groups that agree, at the first of these steps.
        before: the moment of the last look before, at which they were equal; None for none.
        updating: the ranks on which they change from look to look, where they do not on others.
        saved: the line that takes its state before a file is written.
        kept: every rank writes the state of its own to a file, so ranks are meant to differ.
        queues: every tensor that differs is written to in blocks, as a queue is.
        evaluations: of the evaluations on all ranks for which it was looked at, by step, whether
            these tensors differed.
        shares: the ranks evaluate other samples each.
    """

    wrapped: float
    ranks: dict[int, Rank]
    seen: dict[int, OuterModule]
    names: list[str]
    parameters: list[str]
    steps: list[int]
    compared: int
    split: Split
    before: int | None
    updating: tuple[int, ...]
    saved: Location | None
    kept: bool
    queues: bool
    evaluations: dict[int, bool]
    shares: bool

    @property
    def any(self) -> OuterModule:
        return next(iter(self.seen.values()))

    @cached_property
    def update(self) -> tuple[Rank, tuple[Place, ...]] | None:
        """A rank that alone updates it, and the line, with the calls that lead to it."""
        if not self.updating or not self.parameters or self.steps[0] == AT_START:
            return None
        number = self.updating[0]
        rank, module = self.ranks[number], self.seen[number].number
        events = (e for e in rank.of(OuterDigests) if e.module == module and e.update)
        return next(((rank, event.update) for event in events), None)

    @cached_property
    def guard(self) -> Guard | None:
        """The condition that keeps the other ranks from updating it, where the source has one."""
        return None if self.update is None else guard(*self.update)

    @property
    def part(self) -> str:
        """The part of the wrapped model that it looks like, as an expression; empty for none."""
        like = self.any.like
        return "" if like is None else f"model.module{'.' if like[1] else ''}{like[1]}"

    @property
    def originals(self) -> set[str]:
        """The tensors of the wrapped model that it looks like, of those that differ here."""
        if self.any.like is None:
            return set()
        part = self.any.like[1]
        return {f"{part}.{name}" if part else name for name in self.names}

    def _line(self, site: str) -> Location | None:
        spots = (rank.location(getattr(self.seen[n], site)) for n, rank in self.ranks.items())
        return next((spot for spot in spots if spot is not None), None)

    def _owner(self, name: str) -> Location | None:
        """The line that made the part which holds a tensor."""
        for n, rank in self.ranks.items():
            one = self.seen[n]
            if len(one.owners) == len(one.names):
                spot = rank.location(one.owners[one.names.index(name)])
                if spot is not None:
                    return spot
        return None

    def _since(self) -> str:
        first, before = self.steps[0], self.before
        if unequal := self._unequal_evaluations():
            of = f"{len(unequal)} of {len(self.evaluations)}"
            return f" in {of} evaluations compared, first after step {unequal[0]}"
        if first == AT_END:
            return " at the end of the run"
        if before is None:
            return f" when first examined, before step {max(first, 0)}"
        return f" since step {first}" + " or before" * (before < first - 1)

    def _unequal_evaluations(self) -> list[int]:
        """The steps after which copies of the model were evaluated with other buffers."""
        copy = self.any.like is not None and not self.parameters
        return [step for step, unequal in self.evaluations.items() if unequal and copy]

    def severity(self) -> Severity | None:
        """None where it does not matter, as far as was seen."""
        one = self.any
        if self.parameters:
            # Ranks may hold other random projections on purpose, but no other copies.
            return Severity.ERROR if one.like is not None else Severity.WARNING
        if one.like is not None and self.evaluations:
            if not any(self.evaluations.values()):
                return None
            return Severity.WARNING if self.shares else Severity.NOTE
        if one.like is not None:
            # What DDP's next broadcast repairs in the model itself has been copied.
            return Severity.NOTE if self.saved is not None or one.evaluated else None
        if self.kept:
            return None
        if self.saved is not None or (one.learning and not one.trained and not self.queues):
            return Severity.WARNING
        return Severity.NOTE if one.feeds or self.queues else None

    def cause(self) -> str:
        one = self.any
        rest = "DDP makes equal, and keeps equal, only the module that it wraps"
        if not self.wrapped:
            rest = "the program averages gradients only"
        if self.queues:
            return (
                "each rank puts what it computes itself into its own queue: it compares its inputs "
                "with those of one rank, and a checkpoint holds the queue of one rank"
            )
        if self._unequal_evaluations():
            return (
                "each rank writes values of its own into the buffers, and evaluates "
                f"{'its share of the data ' if self.shares else ''}with these, so a result over "
                f"all ranks is that of no one model; {rest}"
            )
        if not self.parameters:
            return f"each rank writes values of its own into the buffers; {rest}"
        before = one.copied and one.made_at < self.wrapped
        made = "copied before the wrap" if before else "copied" if one.copied else "made"
        if self.steps[0] == AT_START:
            return f"it was {made} on each rank, from weights of its own; {rest}"
        if self.updating:
            idle = sorted(self.ranks.keys() - {*self.updating})
            under = f" {self.guard.text}" if self.guard is not None else ""
            return (
                f"{ranks_do(self.updating, 'update')} it{under}, and it stays as it is on "
                f"{ranks_text(idle)}; {rest}"
            )
        if self.before is None:
            return (
                f"it was {made} on each rank from weights of its own, or the ranks update it from "
                f"different values; {rest}"
            )
        return f"the ranks update it from different values; {rest}"

    def fix(self) -> str:
        if self._unequal_evaluations():
            return SEND
        if not self.parameters:
            return f"{UPDATE}. If each rank is meant to have its own, ignore this"
        sent = "for t in module.state_dict().values(): dist.broadcast(t, src=0)"
        if self.guard is not None:
            return f"{self.guard.fix()}, or send the module after each update: `{sent}`"
        if self.updating and self.steps[0] != AT_START:
            return f"update it on every rank, or send it after each update: `{sent}`"
        if self.before is None and self.any.copied and self.part:
            return (
                f"copy it after the wrap (`copy.deepcopy({self.part})`), when all ranks have rank "
                f"0's weights, or send it once: `{sent}`"
            )
        if self.before is None:
            return f"make it from the same seed on every rank, or send it once: `{sent}`"
        return f"update it from values that are equal on all ranks, or send it: `{sent}`"

    def fields(self, run: Run) -> dict[str, object]:
        """The fields of a finding."""
        one, names = self.any, self.parameters or self.names
        owner = self._owner(names[0])
        made, called = owner or self._line("site"), self._line("call_site")
        what = plural(len(names), "parameter" if self.parameters else "buffer")
        related = [Related("called here", called)] if called and made and called != made else []
        if self.saved is not None:
            related.append(Related("its state is taken here", self.saved))
        label = (
            "copied here, apart from the wrapped model"
            if one.copied
            else "what is made here is outside of the wrapped model"
            if self.wrapped
            else "what is made here is not kept equal"
        )
        where = made or called
        if self.update is not None and self.guard is not None:
            rank, places = self.update
            related[:0] = [self.guard.related, *([Related(label, made)] if made else [])]
            where, label = rank.location(places[0].site), "updates it, not on every rank"
        steps = Steps.of(sorted({max(s, 0) for s in self.steps if s != AT_END}))
        whose = "which DDP does not wrap" if self.wrapped else "which nothing keeps equal"
        return {
            "rule": RULE,
            "severity": self.severity(),
            "ranks": odd_ones(self.split),
            # From the first on, they differ at every step that was compared.
            "steps": steps and replace(steps, compared=steps.count),
            "subjects": tuple(names),
            "location": where,
            "label": label,
            "related": tuple(related),
            "summary": f"{what} {some(names)} of {one.kind}, {whose}, "
            f"{causes.differ(len(names), self.split, run)}{self._since()}",
            "cause": self.cause(),
            "fix": self.fix(),
            "fix_kind": FixKind.CHECK,
            "evidence": {
                "tensors_that_differ": f"{len(self.names)} of {len(one.names)}",
                "comparisons_that_differ_since": f"{len(self.steps)} of {self.compared}",
                "gradients_flow_through_it": "yes" if one.learning else "no",
                **({"same_class_and_shapes_as": self.part} if self.part else {}),
            },
            "at": max(rank.wall(self.seen[n].at) for n, rank in self.ranks.items()),
        }


def outer_modules(run: Run) -> Iterator[Outer]:
    """The modules outside of wrappers in which ranks differ that train copies of one model."""
    told: set[object] = set()
    for ranks, wrapped in _groups(run):
        for look, seen in _on_all(ranks).items():
            # Models that are trained without a wrapper belong to copies without one.
            if (look in told) or (wrapped and any(e.trained for e in seen.values())):
                continue
            told.add(look)
            if (found := _compared(wrapped, ranks, seen)) is not None:
                yield found


def compared(run: Run) -> bool:
    """Whether any such module was looked at on several ranks."""
    return any(_on_all(ranks) for ranks, _ in _groups(run))


def _groups(run: Run) -> Iterator[tuple[dict[int, Rank], float]]:
    """The ranks that train copies of a model, and when it was wrapped. What follows from parameters
    that differ is no fault of its own."""
    for group in replicas(run):
        if not group.left_out and divergence(group, "parameters") is None:
            yield {n: m.rank for n, m in group.members.items()}, group.any.wrapped.at
    for copies in trained_copies(run):
        exchanged = any(s.exchanged == "gradients" for look in copies.looks for s in look.values())
        if exchanged and all(map(same, copies.looks)):
            yield {n: rank for n, (rank, _) in copies.members.items()}, 0.0


def _on_all(ranks: dict[int, Rank]) -> dict[object, dict[int, OuterModule]]:
    """The modules that all ranks have, by look: of modules that look alike, the n-th of each."""
    found: dict[object, dict[int, OuterModule]] = {}
    for number, rank in ranks.items():
        count: dict[object, int] = {}
        for event in rank.of(OuterModule):
            look = event.kind, event.names, event.shapes, event.parameters
            nth = count[look] = count.get(look, 0) + 1
            found.setdefault((look, nth), {})[number] = event
    return {look: seen for look, seen in found.items() if seen.keys() == ranks.keys()}


def _compared(wrapped: float, ranks: dict[int, Rank], seen: dict[int, OuterModule]) -> Outer | None:
    tables = {n: _digests(rank, seen[n]) for n, rank in ranks.items()}
    common = set.intersection(*(set(table) for table in tables.values()))
    moments = [*sorted(common - {AT_END}), *sorted(common & {AT_END})]
    names = next(iter(seen.values())).names
    own = _kept_apart(ranks, seen)
    differing = {
        moment: [
            p
            for p, values in enumerate(zip(*rows, strict=False))
            if len({*values}) > 1 and names[p] not in own
        ]
        for moment in moments
        if (rows := [table[moment] for table in tables.values()])
    }
    found = [moment for moment in moments if differing[moment]]
    # Tensors that are made equal again now and then are exchanged by the program.
    if not found or not differing[moments[-1]]:
        return None
    last = sorted(set(differing[moments[-1]]))
    steps = [moment for moment in found if set(differing[moment]) & {*last}]
    since = moments[moments.index(steps[0]) :]
    if len(steps) < len(since):
        return None
    count = next(iter(seen.values())).parameters
    saved = _saved(ranks, seen)
    queues = {
        position
        for number, rank in ranks.items()
        for event in rank.of(OuterDigests)
        if event.module == seen[number].number
        for position in event.queues
    }
    outer = Outer(
        wrapped=wrapped,
        ranks=ranks,
        seen=seen,
        names=[names[p] for p in last],
        parameters=[names[p] for p in last if p < count],
        steps=steps,
        compared=len(since),
        split=_split(tables, steps[0]),
        before=None if steps[0] == moments[0] else moments[moments.index(steps[0]) - 1],
        updating=_updating(tables, moments, last),
        saved=next(iter(saved.values()), None),
        kept=saved.keys() == ranks.keys(),
        queues=all(p in queues for p in last),
        evaluations=_evaluations(ranks, seen, last),
        shares=_evaluate_shares(ranks),
    )
    return outer if outer.severity() is not None else None


def _updating(
    tables: dict[int, dict[int, list[int]]], moments: list[int], positions: list[int]
) -> tuple[int, ...]:
    """The ranks on which some of these tensors change, if on others none of them ever does."""
    changing = {
        number
        for number, table in tables.items()
        if any(len({table[moment][p] for moment in moments}) > 1 for p in positions)
    }
    told = changing != tables.keys() and len(moments) >= FEWEST_LOOKS
    return tuple(sorted(changing)) if told else ()


def _kept_apart(ranks: dict[int, Rank], seen: dict[int, OuterModule]) -> set[str]:
    """The tensors of a copy of a wrapped model that DDP was told to ignore in the model itself, so
    that each rank has its own."""
    number, one = next(iter(seen.items()))
    if one.like is None:
        return set()
    model, part = one.like
    prefix = f"{part}." if part else ""
    return {
        tensor.name.removeprefix(prefix)
        for wrapped in ranks[number].of(Wrapped)
        if wrapped.model == model
        for tensor in (*wrapped.parameters, *wrapped.buffers)
        if tensor.ignored and tensor.name.startswith(prefix)
    }


def _digests(rank: Rank, module: OuterModule) -> dict[int, list[int]]:
    events = (e for e in rank.of(OuterDigests) if e.module == module.number and not e.evaluated)
    return {e.step: list(unpack(e.values)) for e in events}


def _evaluate_shares(ranks: dict[int, Rank]) -> bool:
    """Whether a loader that is read without gradients gave the ranks other samples."""
    orders: dict[tuple[int, int], list[int]] = {}
    for rank in ranks.values():
        for epoch in rank.of(EpochEnded):
            if epoch.order and not epoch.backwards and not epoch.grad_enabled:
                orders.setdefault((epoch.loader, epoch.epoch), []).append(epoch.order)
    return any(len({*each}) > 1 for each in orders.values())


def _evaluations(
    ranks: dict[int, Rank], seen: dict[int, OuterModule], positions: list[int]
) -> dict[int, bool]:
    """Whether ranks differed in these tensors, by the step after which all of them evaluated."""
    tables = [
        {
            e.step: unpack(e.values)
            for e in rank.of(OuterDigests)
            if e.evaluated and e.module == seen[number].number
        }
        for number, rank in ranks.items()
    ]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    return {s: any(len({t[s][p] for t in tables}) > 1 for p in positions) for s in common}


def _split(tables: dict[int, dict[int, list[int]]], moment: int) -> Split:
    sides: dict[tuple[int, ...], list[int]] = {}
    for number, table in tables.items():
        sides.setdefault(tuple(table[moment]), []).append(number)
    return sorted((tuple(side) for side in sides.values()), key=lambda side: (-len(side), side))


def _saved(ranks: dict[int, Rank], seen: dict[int, OuterModule]) -> dict[int, Location | None]:
    """By rank that writes it to a file: the line at which the state of the module was taken."""
    found: dict[int, Location | None] = {}
    for number, rank in ranks.items():
        files = rank.of(FileWritten)
        for event in rank.of(OuterStateTaken):
            mine = event.module == seen[number].number
            if mine and any(f.step == event.step and f.at >= event.at for f in files):
                found.setdefault(number, rank.location(event.site))
    return found
