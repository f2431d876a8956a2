"""Wrapped models of a run: their parameters, the modules these belong to, and who holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from ...events import (
    GroupReady,
    ModulesSkipped,
    OptimizerSeen,
    Ownership,
    ParameterUse,
    Replica,
    UnusedParameters,
    Wrapped,
)
from ...events.drift import UNHELD
from ...events.pack import unpack
from ...report.findings import Related
from ...run import Location, Rank, Run, title_of, whom

NO_DDP = "no model was wrapped in DistributedDataParallel"

E = TypeVar("E")


@dataclass(frozen=True)
class Reason:
    """Why a check found something, and what it says then.

    Attributes:
        when: says when this reason decides, for the check's page.
        cause, fix: templates that the check fills in.
    """

    when: str
    label: str = ""
    cause: str = ""
    fix: str = ""


def rules(reasons: Mapping[str, Reason]) -> dict[str, str]:
    """The `rules` of a check whose findings have these reasons."""
    return {rule: reason.when for rule, reason in reasons.items()}


@dataclass(frozen=True)
class Seen(Generic[E]):
    """What ranks recorded of one wrapped model: by rank, of at least one."""

    run: Run
    model: int
    records: dict[Rank, list[E]]

    @property
    def rank(self) -> Rank:
        """The first of the ranks; its words stand for all of them."""
        return next(iter(self.records))

    @cached_property
    def wrapped(self) -> Wrapped:
        wrapped = wrap_of(self.rank, self.model)
        assert wrapped is not None
        return wrapped

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(r.rank for r in self.records)

    @property
    def where(self) -> str:
        return on_ranks(self.run, self.ranks)

    @property
    def title(self) -> str:
        return title_of(self.rank, self.wrapped)

    @property
    def wrapper(self) -> str:
        """The wrapper's name in the program, and `inner` that of the model in it."""
        return names_in_code(self.rank, self.wrapped)[0]

    @property
    def inner(self) -> str:
        return names_in_code(self.rank, self.wrapped)[1]


def seen(run: Run, of: Callable[[Rank, Wrapped], list[E]]) -> Iterator[Seen[E]]:
    """For each model, what ranks recorded of it that share it with others."""
    for model in numbers(run):
        each = ((r, w) for r in run.ranks.values() if (w := wrap_of(r, model)) is not None)
        shared = ((r, of(r, w)) for r, w in each if len(members(r, w)[1]) > 1)
        if records := {rank: events for rank, events in shared if events}:
            yield Seen(run, model, records)


def needs_ddp(run: Run) -> str | None:
    """For checks that judge wrapped models only."""
    return None if numbers(run) else NO_DDP


@dataclass(frozen=True)
class Part:
    """A module and those of its parameters that a finding is about.

    Attributes:
        module: its name, empty for the model itself; `kind` is its class.
        positions: of the parameters, in `Wrapped.parameters`.
        whole: these are all trainable parameters of the module.
    """

    module: str
    kind: str
    positions: tuple[int, ...]
    whole: bool

    @property
    def title(self) -> str:
        """`body.head (Linear)`."""
        return f"{self.module or 'the model'} ({self.kind})" if self.kind else self.module

    def code(self, model: str) -> str:
        """`model.blocks[0].norm`, as a program writes it."""
        words = self.module.split(".") if self.module else []
        return model + "".join(f"[{w}]" if w.isdecimal() else f".{w}" for w in words)


def numbers(run: Run) -> list[int]:
    """Numbers of the wrapped models of a run. A model has the same number on all ranks that wrap
    models in the same order."""
    return sorted({w.model for r in run.ranks.values() for w in r.of(Wrapped)})


def wrap_of(rank: Rank, model: int) -> Wrapped | None:
    return next((w for w in rank.of(Wrapped) if w.model == model), None)


def names_in_code(rank: Rank, wrapped: Wrapped) -> tuple[str, str]:
    """Names in the program of the wrapper and of the model that it wraps; `model` where one is
    unknown."""
    wrapper, inner = rank.names_of(wrapped)
    return wrapper or "model", inner or "model"


def members(rank: Rank, wrapped: Wrapped) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of the group that a model is replicated over."""
    group = next((g for g in rank.of(GroupReady) if g.group == wrapped.group), None)
    return (group.name, group.ranks) if group else ("", ())


def sets_of(rank: Rank, model: int) -> list[UnusedParameters]:
    """Records of unused parameters, the last one of each backward: several backwards over one
    forward may each bring a part of the gradients."""
    return list({e.backward: e for e in rank.of(UnusedParameters) if e.model == model}.values())


def use_of(rank: Rank, model: int) -> ParameterUse | None:
    """The last summary of which parameters the rank used."""
    return next((e for e in reversed(rank.of(ParameterUse)) if e.model == model), None)


def thawed(rank: Rank, model: int) -> tuple[int, ...]:
    """Positions of parameters that were frozen in a backward and thawed later."""
    use = use_of(rank, model)
    return use.thawed if use is not None else ()


def skipped_of(rank: Rank, model: int) -> list[ModulesSkipped]:
    """Records of modules that a forward did not call."""
    return [e for e in rank.of(ModulesSkipped) if e.model == model]


def held_by_others(run: Run, rank: Rank, model: int) -> set[str]:
    """Names of parameters that optimizers on other ranks of the model's group hold at the end."""
    return {
        name
        for other in run.ranks.values()
        for seen in other.of(Replica)
        if other is not rank and seen.model == model and rank.rank in seen.ranks
        if seen.optimizer != UNHELD
        if (wrapped := wrap_of(other, model)) is not None
        for name in set(names_of(wrapped, unpack(seen.parameters))) - _in_none(other, model)
    }


def _in_none(rank: Rank, model: int) -> set[str]:
    """Names of parameters that no optimizer of a rank holds at the end."""
    reported = [e for e in rank.of(Ownership) if e.model == model]
    return set(reported[-1].missing) if reported else set()


def steps_of(rank: Rank, model: int) -> int:
    """Steps of the model's optimizer, of the one with the most steps if there are several; of the
    rank's busiest optimizer if none is known to hold the model's parameters."""
    own = (o.optimizer for o in rank.of(OptimizerSeen) if model in o.models)
    return max(map(rank.steps_of, own), default=0) or rank.steps


def parts_of(wrapped: Wrapped, positions: Iterable[int]) -> list[Part]:
    """The parameters at these positions by module: the largest modules that hold nothing else, and
    for the rest the modules that own them."""
    chosen = set(positions)
    kinds = {m.name: m.kind for m in wrapped.modules}
    below: dict[str, set[int]] = {}
    for i, parameter in enumerate(wrapped.parameters):
        if parameter.trainable and not parameter.ignored:
            for owner in _owners(parameter.name):
                below.setdefault(owner, set()).add(i)
    found: dict[str, list[int]] = {}
    for i in sorted(chosen):
        owners = _owners(wrapped.parameters[i].name)
        whole = [o for o in owners if o and o in kinds and below.get(o, set()) <= chosen]
        found.setdefault(whole[0] if whole else owners[-1], []).append(i)
    return [
        Part(name, kinds.get(name, ""), tuple(at), below.get(name, set()) <= chosen)
        for name, at in found.items()
    ]


def _owners(parameter: str) -> list[str]:
    """Names of the modules around a parameter, outermost first: ``, `a` and `a.b` for
    `a.b.weight`."""
    words = parameter.split(".")[:-1]
    return [".".join(words[:n]) for n in range(len(words) + 1)]


def made_at(rank: Rank, wrapped: Wrapped, part: Part) -> Location | None:
    """The line that made a part, or else the nearest module around it with a known line."""
    if not part.whole:
        for i in part.positions:
            if (spot := rank.location(wrapped.parameters[i].site)) is not None:
                return spot
    sites = {m.name: m.site for m in wrapped.modules}
    owner = part.module
    while owner:
        if (spot := rank.location(sites.get(owner, -1))) is not None:
            return spot
        owner = owner.rpartition(".")[0]
    return rank.location(sites.get("", -1)) or rank.location(wrapped.site)


def branch_of(event: UnusedParameters, part: Part) -> int:
    """Site of the `if` in the user's forward that skips a part, -1 where none was found."""
    for name, site in event.branches.items():
        around, inside = f"{part.module}.".startswith(f"{name}."), name.startswith(part.module)
        if around or inside:
            return site
    return -1


def names_of(wrapped: Wrapped, positions: Iterable[int]) -> tuple[str, ...]:
    """Names of the parameters at these positions."""
    return tuple(wrapped.parameters[i].name for i in positions if i < len(wrapped.parameters))


def on_ranks(run: Run, ranks: Iterable[int]) -> str:
    """`on all 4 ranks`, `on rank 1`, `on ranks 0-2`."""
    return f"on {whom(ranks, run.world_size)}"


def related(rank: Rank, places: Iterable[tuple[str, int]]) -> tuple[Related, ...]:
    """Related lines from pairs of label and site, without those of unknown lines."""
    return tuple(_known(rank, places))


def _known(rank: Rank, places: Iterable[tuple[str, int]]) -> Iterator[Related]:
    for label, site in places:
        if (spot := rank.location(site)) is not None:
            yield Related(label, spot)
