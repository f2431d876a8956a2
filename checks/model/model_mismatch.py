"""DDP309."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_order import WrapOrder, wrap_order
from ddpdoctor.analysis.models.wrapped_models import Reason
from ddpdoctor.events import OptimizerSeen, Tensor, Unwrapped, UnwrappedState, Wrapped
from ddpdoctor.events.pack import unpack
from ddpdoctor.report.declarations import Effect, When, seen, several_ranks
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Evidence, Finding, Related, Severity
from ddpdoctor.run import Location, Rank, Run, listed, ranks_text

REPORTED = 12
"""Rows of the table of differences."""

OPTIMIZER_ORDER = "optimizer-order"

REASONS = {
    "different-names": Reason(
        "the models have parameters of other names",
        cause="the ranks built the model from different arguments, or took different branches",
        fix="build the model from the same arguments, and take the same branches, on every rank: "
        "no layer may depend on the rank or its data",
    ),
    "parameter-order": Reason(
        "the models have the same parameters in another order",
        cause="the same layers are registered in another order (from a set, a directory listing, a "
        "hash): {effect}",
        fix="register layers in the same order on every rank: `for name in sorted(names)`, not "
        "`for name in set(names)`",
    ),
    OPTIMIZER_ORDER: Reason(
        "the models are equal, and the optimizer has their parameters in another order",
        cause="the ranks' models are equal, but {optimizer} has the parameters in another order "
        "(it comes from a set, or from sorting by a hash or an id, say): {effect}",
        fix="sort the parameters by what is equal on all ranks, such as their name or their "
        "position in `model.parameters()`; never by `hash` of a text or `id`, nor take them from a "
        "set",
    ),
    "different-shapes": Reason(
        "the same parameters have other shapes",
        cause="their shapes differ",
        fix="give the layers the same sizes on every rank: a size counted from data must be "
        "counted over all of it, or on rank 0 and broadcast, before the model is built",
    ),
    "different-dtypes": Reason(
        "the same parameters have other dtypes",
        cause="their dtypes differ",
        fix="convert the model to the same dtype on every rank before the wrap: `model.to(dtype)`",
    ),
    "frozen-on-some-ranks": Reason(
        "the same parameters are frozen on some ranks only",
        cause="some are frozen on some ranks only",
        fix="freeze the same parameters on every rank, or on none, before the wrap",
    ),
}
UNSTEADY = "this order differs between processes"
PROPERTIES = {
    "different-shapes": "shape",
    "different-dtypes": "dtype",
    "frozen-on-some-ranks": "trainable",
}
"""Attributes of `Tensor` that may differ between parameters of equal names; the first decides."""


@dataclass(frozen=True)
class ParameterList:
    """One rank's list of parameters of a model.

    Attributes:
        origin: the record that lists them.
        number: how many models the rank wrapped for the group before.
    """

    rank: Rank
    origin: Wrapped | Unwrapped
    parameters: tuple[Tensor, ...]
    number: int = 0

    def signature(self) -> tuple[object, ...]:
        return tuple(_signature(p) for p in self.parameters)


@dataclass(frozen=True)
class Mismatch:
    """Lists of a group, those that most ranks have, and the others (at least one)."""

    lists: list[ParameterList]
    majority: list[ParameterList]
    others: list[ParameterList]

    @property
    def here(self) -> ParameterList:
        return self.majority[0]

    @property
    def there(self) -> ParameterList:
        return self.others[0]

    @property
    def pairs(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """The parameters of two ranks by position."""
        return list(zip_longest(self.here.parameters, self.there.parameters))

    @property
    def places(self) -> list[int]:
        """Positions at which two ranks differ."""
        return [i for i, (p, q) in enumerate(self.pairs) if _signature(p) != _signature(q)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The minority, where there is one."""
        clear = 2 * len(self.majority) > len(self.lists)
        return tuple(each.rank.rank for each in (self.others if clear else self.lists))

    @property
    def at(self) -> float:
        return min(each.rank.wall(each.origin.at) for each in self.lists)


class ModelMismatch(Check):
    """Ranks wrap different models

    ## What it finds
    Lists of parameters that differ between the ranks of a group when the model is wrapped (or, if
    gradients are synchronised manually, when the optimizer first steps): other names, another
    order, other shapes or dtypes, or frozen on some ranks only. Also the same models wrapped in
    another order, and an optimizer that has the parameters of equal models in another order.

    ## How it knows
    When the wrapper is made, before it communicates, each rank records the model's parameters:
    names, shapes, dtypes and which of them are trained. For a model without a wrapper, it is the
    list that the optimizer holds at its first step. The lists of the ranks of one group are
    compared position by position, and so are the lines that made the models. The finding is proven.

    ## Why it hurts
    DDP broadcasts and reduces by position. If the shapes differ, the constructor raises or hangs.
    If they happen to be equal (layers registered from a `set`, or in the order of a directory
    listing), it mixes the weights and gradients of different layers without an error.

    ## How to fix it
    Build the model from the same arguments on every rank, and register layers in a fixed order:
    `for name in sorted(names)`. Wrap several models in a fixed order, too. Compute sizes from all
    of the data, or on rank 0 and broadcast them. Convert to one dtype, and freeze on every rank or
    on none, before the wrap.

    ## When it stays quiet
    - Each rank's optimizer holds other parameters of the same model: a sharded optimizer.
    - Only parameters in `_ddp_params_and_buffers_to_ignore` differ.
    - The models belong to different groups (pipeline stages, experts).
    """

    code = "DDP309"
    name = "model-mismatch"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "wrap-order": "the ranks wrap the same models in another order",
        "wrap-loop": "one loop wraps different models, most likely in another order on each rank",
        "different-branches": "different lines made the models: the ranks took other branches",
        **models.rules(REASONS),
    }
    requires = (several_ranks, seen(Wrapped, Unwrapped, otherwise=models.NO_DDP))
    effects = (
        Effect(("first-failure",), errors=(ErrorKind.DIFFERENT_MODELS, ErrorKind.CONNECTION)),
        # gloo aborts at collectives that do not fit together.
        Effect(("rank-died",), when=(When.about("SIGABRT"),)),
        Effect(
            (
                "gradient-drift",
                "parameter-drift",
                "buffer-drift",
                "rank-missing",
                "stall",
                "collective-shape-mismatch",
                "collective-mismatch",
                "rank-dependent-graph",
            )
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        reordered: set[tuple[int, ...]] = set()
        for lists in [*_wrapped(run), *_synced_manually(run)]:
            ranks = tuple(each.rank.rank for each in lists)
            majority, others = _sides(lists)
            if not others:
                continue
            mismatch = Mismatch(lists, majority, others)
            origins = _origins(mismatch.here, mismatch.there)
            if origins is None:
                yield self._report(mismatch)
            elif not origins.reordered or ranks not in reordered:
                # Another order of wraps shows again at each later model: it is one fault.
                yield self._report_origins(mismatch, origins)
                if origins.reordered:
                    reordered.add(ranks)

    def _report_origins(self, mismatch: Mismatch, origins: WrapOrder) -> Finding:
        """The finding of models that different lines made."""
        here, there = mismatch.here, mismatch.there
        who = ranks_text(h.rank.rank for h in mismatch.majority), ranks_text([there.rank.rank])
        what = "their models in another order" if origins.permuted else "different models"
        which = f"model number {here.number + 1}" if here.number else "the first"
        lines = [Related(f"the model of {w}", at) for w, at in zip(who, origins.made, strict=True)]
        wrapped = origins.loop or there.rank.location(there.origin.site)
        if not origins.reordered and wrapped is not None:
            lines = [lines[1], lines[0], Related("wrapped here", wrapped)]
            wrapped = origins.made[1]
        return self.finding(
            rule=origins.rule,
            ranks=mismatch.ranks,
            subjects=tuple(dict.fromkeys((here.origin.kind, there.origin.kind))),
            location=wrapped,
            label="not the same model on all ranks",
            related=tuple(r for r in lines if r.location != wrapped),
            summary=f"ranks wrap {what}: {which} is the {here.origin.kind} made "
            f"{_in(origins.made[0])} on {who[0]}, and the {there.origin.kind} made "
            f"{_in(origins.made[1])} on {who[1]}",
            cause=origins.cause,
            fix=origins.fix,
            evidence=_compared(mismatch),
            at=mismatch.at,
        )

    def _report(self, mismatch: Mismatch) -> Finding:
        """The finding of one model whose parameters differ between ranks."""
        here, there, places = mismatch.here, mismatch.there, mismatch.places
        first = places[0]
        one, other = mismatch.pairs[first]
        odd = here if other is None or (one is not None and not one.trainable) else there
        rule, *more = _rules(mismatch)
        kind = here.origin.kind or "the model"
        origin = "wrapped here" if isinstance(odd.origin, Wrapped) else "made here"
        subject = f"{kind} differs between ranks"
        location, lines = _made_at(odd, first), [(origin, odd.origin.site)]
        if rule == OPTIMIZER_ORDER and isinstance(odd.origin, Unwrapped):
            made = _optimizer(odd)
            subject = f"{_optimizer_kind(odd)} has the parameters of {kind} in another order"
            location = odd.rank.location(made.site) if made is not None else location
            lines = [
                *((UNSTEADY, n) for n in odd.origin.unsteady),
                (f"{kind} is {origin}", odd.origin.site),
            ]
        return self.finding(
            rule=rule,
            ranks=mismatch.ranks,
            subjects=tuple(
                dict.fromkeys(p.name for i in places[:REPORTED] for p in odd.parameters[i : i + 1])
            ),
            location=location,
            label=f"differs: {_difference(mismatch, one, other)}",
            related=models.related(odd.rank, lines),
            summary=f"{subject}: parameter {first} is "
            f"{_described(one)} on rank {here.rank.rank} and {_described(other)} on rank "
            f"{there.rank.rank}",
            cause=_cause(odd, rule, more),
            fix=REASONS[rule].fix,
            evidence=_compared(mismatch),
            at=mismatch.at,
        )


def _wrapped(run: Run) -> Iterator[list[ParameterList]]:
    """Per group of ranks and position, the models that the ranks wrapped there."""
    found: dict[tuple[object, ...], list[ParameterList]] = {}
    for rank in run.ranks.values():
        counts: Counter[tuple[int, ...]] = Counter()
        for wrapped in rank.of(Wrapped):
            _, ranks = models.members(rank, wrapped)
            parameters = tuple(p for p in wrapped.parameters if not p.ignored)
            found.setdefault((ranks, counts[ranks]), []).append(
                ParameterList(rank, wrapped, parameters, counts[ranks])
            )
            counts[ranks] += 1
    for (members, _), each in found.items():
        if len(each) > 1 and members:
            yield each


def _synced_manually(run: Run) -> Iterator[list[ParameterList]]:
    """Parameters of no wrapper whose gradients the program synchronises over the default group: per
    optimizer, its first list, then the list after parameters were added to it, and so on."""
    found: dict[tuple[int, int], list[ParameterList]] = {}
    for rank in run.ranks.values():
        reducing = {s.optimizer for s in rank.of(UnwrappedState) if s.exchanged == "gradients"}
        reported: Counter[int] = Counter()
        for event in rank.of(Unwrapped):
            if event.optimizer in reducing:
                found.setdefault((event.optimizer, reported[event.optimizer]), []).append(
                    ParameterList(rank, event, event.parameters)
                )
                reported[event.optimizer] += 1
    yield from (lists for lists in found.values() if len(lists) > 1 and not _shared_out(lists))


def _shared_out(lists: list[ParameterList]) -> bool:
    """Whether each rank's optimizer holds other parameters of one model: the program shares out its
    optimizer (ZeRO), and the lists tell nothing of the models."""
    names = [{p.name for p in each.parameters} for each in lists]
    kinds = {(each.origin.kind, str(each.rank.location(each.origin.site))) for each in lists}
    return len(kinds) == 1 and sum(map(len, names)) == len(set().union(*names))


def _sides(lists: list[ParameterList]) -> tuple[list[ParameterList], list[ParameterList]]:
    """The ranks with the model that most have, and the others: their model has other parameters, or
    equal ones, but the ranks wrap each other's model later."""
    usual, _ = Counter(h.signature() for h in lists).most_common(1)[0]
    majority = [h for h in lists if h.signature() == usual]
    others = [h for h in lists if h.signature() != usual]
    if others or len(lists) < 2:
        return majority, others
    permuted = [
        h for h in lists if (found := _wrap_order(lists[0], h)) is not None and found.permuted
    ]
    return [h for h in lists if h not in permuted], permuted


def _wrap_order(here: ParameterList, there: ParameterList) -> WrapOrder | None:
    if isinstance(here.origin, Wrapped) and isinstance(there.origin, Wrapped):
        return wrap_order((here.rank, here.origin), (there.rank, there.origin))
    return None


def _origins(here: ParameterList, there: ParameterList) -> WrapOrder | None:
    """How the lines that made two models differ; None if it is one model, at most with other dtypes
    or frozen on some ranks."""
    found = _wrap_order(here, there)
    layers = [[(p.name, p.shape) for p in each.parameters] for each in (here, there)]
    return found if found and (found.permuted or layers[0] != layers[1]) else None


def _compared(mismatch: Mismatch) -> Evidence:
    places, pairs = mismatch.places, mismatch.pairs
    ranks = [f"rank {each.rank.rank}" for each in (mismatch.here, mismatch.there)]
    return {
        "differences": f"{len(places)} of {len(pairs)} parameters",
        "parameters": [
            {"position": i, **dict(zip(ranks, map(_described, pairs[i]), strict=True))}
            for i in places[:REPORTED]
        ],
    }


def _in(made: Location) -> str:
    """`in build (train.py:12)`, or `at train.py:12` outside of functions."""
    named = made.function and not made.function.startswith("<")
    return f"in {made.function} ({made})" if named else f"at {made}"


def _signature(parameter: Tensor | None) -> tuple[object, ...]:
    if parameter is None:
        return ()
    return parameter.name, parameter.shape, parameter.dtype, parameter.trainable


def _difference(mismatch: Mismatch, one: Tensor | None, other: Tensor | None) -> str:
    """What differs at the first position that does, in a few words."""
    if one is None or other is None:
        return "not on every rank"
    if one.name != other.name:
        return "another parameter at this position"
    if one.shape != other.shape:
        return f"shape {_shape(one)} vs {_shape(other)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} vs {other.dtype}"
    place = mismatch.places[0]
    ranks: dict[bool, list[int]] = {True: [], False: []}
    for each in mismatch.lists:
        for parameter in each.parameters[place : place + 1]:
            ranks[parameter.trainable].append(each.rank.rank)
    return f"frozen on {ranks_text(ranks[False])}, trained on {ranks_text(ranks[True])}"


def _described(parameter: Tensor | None) -> str:
    """`head.weight 2x8 float32 frozen`."""
    if parameter is None:
        return "absent"
    frozen = "" if parameter.trainable else " frozen"
    return f"{parameter.name} {_shape(parameter)} {parameter.dtype}{frozen}"


def _shape(parameter: Tensor) -> str:
    return "x".join(map(str, parameter.shape)) or "scalar"


def _rules(mismatch: Mismatch) -> list[str]:
    """The rules by which two lists of one model differ: names come before properties, of which
    several may."""
    lists = mismatch.here.parameters, mismatch.there.parameters
    names, others = ([p.name for p in each] for each in lists)
    if names != others:
        if set(names) != set(others):
            return ["different-names"]
        models_own = _as_registered(mismatch.here), _as_registered(mismatch.there)
        same = models_own[0] == models_own[1] and bool(models_own[0])
        return [OPTIMIZER_ORDER if same else "parameter-order"]
    pairs = list(zip(*lists, strict=True))
    return [
        rule
        for rule, what in PROPERTIES.items()
        if any(getattr(p, what) != getattr(q, what) for p, q in pairs)
    ]


def _as_registered(each: ParameterList) -> list[tuple[object, ...]]:
    """The parameters that an optimizer has in the order in which the module has them, with their
    positions there; empty where that is not known."""
    places = unpack(each.origin.places) if isinstance(each.origin, Unwrapped) else []
    known = len(places) == len(each.parameters)
    rows = zip(places, each.parameters, strict=True) if known else ()
    return sorted((place, p.name, p.shape, p.dtype) for place, p in rows)


def _optimizer(each: ParameterList) -> OptimizerSeen | None:
    """The optimizer whose list it is."""
    number = each.origin.optimizer if isinstance(each.origin, Unwrapped) else -1
    events = (e for e in each.rank.of(OptimizerSeen) if e.optimizer == number)
    return next(events, None)


def _optimizer_kind(each: ParameterList) -> str:
    made = _optimizer(each)
    return made.kind if made is not None else "the optimizer"


def _cause(here: ParameterList, rule: str, more: list[str]) -> str:
    if rule in PROPERTIES:
        what = listed([REASONS[each].cause for each in (rule, *more)])
        return f"the parameters have the same names in the same order, but {what}"
    effect = (
        "DDP broadcasts and reduces by position, so it mixes them"
        if isinstance(here.origin, Wrapped)
        else "collectives match by the order of their calls, so gradients that are reduced in the "
        "order of the parameters are mixed"
    )
    return REASONS[rule].cause.format(effect=effect, optimizer=_optimizer_kind(here))


def _made_at(each: ParameterList, place: int) -> Location | None:
    """The line that froze or made the parameter at a position."""
    origin = each.origin
    if isinstance(origin, Wrapped):
        if not each.parameters[place].trainable and origin.frozen_site >= 0:
            return each.rank.location(origin.frozen_site)
        name = each.parameters[place].name
        position = next(i for i, p in enumerate(origin.parameters) if p.name == name)
        part = models.parts_of(origin, [position])[0]
        owner = models.Part(name.rpartition(".")[0], part.kind, (position,), False)
        return models.made_at(each.rank, origin, owner)
    return each.rank.location(origin.site)
