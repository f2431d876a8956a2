"""DDP309."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_order import WrapOrder, wrap_order
from ddpdoctor.events import Tensor, Unwrapped, UnwrappedState, Wrapped
from ddpdoctor.report.findings import Check, Evidence, Finding, Related, Severity
from ddpdoctor.run import Location, Rank, Run, listed, ranks_text

REPORTED = 12
"""Rows of the table of differences."""

PROPERTIES = {
    "shape": "their shapes differ",
    "dtype": "their dtypes differ",
    "trainable": "some are frozen on some ranks only",
}
"""What differs between parameters of equal names, by the attribute of `Tensor`; the first decides.
"""

PROPERTY_RULES = {
    "shape": "different-shapes",
    "dtype": "different-dtypes",
    "trainable": "frozen-on-some-ranks",
}

PROPERTY_FIXES = {
    "shape": "give the layers the same sizes on every rank: a size counted from data must be "
    "counted over all of it, or on rank 0 and broadcast, before the model is built",
    "dtype": "convert the model to the same dtype on every rank before the wrap: `model.to(dtype)`",
    "trainable": "freeze the same parameters on every rank, or on none, before the wrap",
}


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


class ModelMismatch(Check):
    """Ranks wrap different models

    ## What it finds
    Lists of parameters that differ between the ranks of a group when the model is wrapped (or, if
    gradients are synchronised manually, when the optimizer first steps): other names, another
    order, other shapes or dtypes, or frozen on some ranks only. Also the same models wrapped in
    another order.

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
        "different-names": "the models have parameters of other names",
        "parameter-order": "the models have the same parameters in another order",
        "different-shapes": "the same parameters have other shapes",
        "different-dtypes": "the same parameters have other dtypes",
        "frozen-on-some-ranks": "the same parameters are frozen on some ranks only",
    }

    def unobserved(self, run: Run) -> str | None:
        if run.world_size < 2:
            return "one rank only"
        return None if run.any(Wrapped) or run.any(Unwrapped) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        reordered: set[tuple[int, ...]] = set()
        for lists in [*_wrapped(run), *_synced_manually(run)]:
            ranks = tuple(each.rank.rank for each in lists)
            majority, others = _sides(lists)
            if not others:
                continue
            origins = _origins(majority[0], others[0])
            if origins is None:
                yield self._report(run, lists, majority, others)
            elif not origins.reordered or ranks not in reordered:
                # Another order of wraps shows again at each later model: it is one fault.
                yield self._report_origins(lists, majority, others, origins)
                if origins.reordered:
                    reordered.add(ranks)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "first-failure":
            text = str(other.evidence)
            return "same model across" in text or "to match sizes" in text or "onnection" in text
        if other.check == "rank-died":  # gloo, of collectives that do not fit together
            return "SIGABRT" in other.subjects
        return other.check in (
            "gradient-drift", "parameter-drift", "buffer-drift", "rank-missing", "stall",
            "collective-shape-mismatch", "collective-mismatch", "rank-dependent-graph",
        )  # fmt: skip

    def _report_origins(
        self,
        lists: list[ParameterList],
        majority: list[ParameterList],
        others: list[ParameterList],
        origins: WrapOrder,
    ) -> Finding:
        """The finding of models that different lines made."""
        here, there = majority[0], others[0]
        clear = 2 * len(majority) > len(lists)
        who = [ranks_text(ranks) for ranks in ([h.rank.rank for h in majority], [there.rank.rank])]
        what = "their models in another order" if origins.permuted else "different models"
        which = f"model number {here.number + 1}" if here.number else "the first"
        lines = [Related(f"the model of {w}", at) for w, at in zip(who, origins.made, strict=True)]
        wrapped = origins.loop or there.rank.location(there.origin.site)
        if not origins.reordered and wrapped is not None:
            lines = [lines[1], lines[0], Related("wrapped here", wrapped)]
            wrapped = origins.made[1]
        return self.finding(
            rule=origins.rule,
            ranks=tuple(h.rank.rank for h in (others if clear else lists)),
            subjects=tuple(dict.fromkeys((here.origin.kind, there.origin.kind))),
            location=wrapped,
            label="not the same model on all ranks",
            related=tuple(r for r in lines if r.location != wrapped),
            summary=f"ranks wrap {what}: {which} is the {here.origin.kind} made "
            f"{_in(origins.made[0])} on {who[0]}, and the {there.origin.kind} made "
            f"{_in(origins.made[1])} on {who[1]}",
            cause=origins.cause,
            fix=origins.fix,
            evidence=_compared(here, there),
            at=min(h.rank.wall(h.origin.at) for h in lists),
        )

    def _report(
        self,
        run: Run,
        lists: list[ParameterList],
        majority: list[ParameterList],
        others: list[ParameterList],
    ) -> Finding:
        """The finding of one model whose parameters differ between ranks."""
        here, there = majority[0], others[0]
        places = _differences(here.parameters, there.parameters)
        first = places[0]
        clear = 2 * len(majority) > len(lists)
        odd = there if first < len(there.parameters) else here
        if (frozen := _at(here.parameters, first)) is not None and not frozen.trainable:
            odd = here
        rule = _rule(here, there)
        cause, fix = _cause(here, there, rule)
        what = _difference(lists, here, there, first)
        kind = here.origin.kind or "the model"
        origin = "wrapped here" if isinstance(odd.origin, Wrapped) else "made here"
        return self.finding(
            rule=rule,
            ranks=tuple(h.rank.rank for h in (others if clear else lists)),
            subjects=tuple(
                dict.fromkeys(p.name for i in places[:REPORTED] if (p := _at(odd.parameters, i)))
            ),
            location=_made_at(odd, first),
            label=f"differs: {what}",
            related=models.related(odd.rank, ((origin, odd.origin.site),)),
            summary=f"{kind} differs between ranks: parameter {first} is "
            f"{_described(_at(here.parameters, first))} on rank {here.rank.rank} and "
            f"{_described(_at(there.parameters, first))} on rank {there.rank.rank}",
            cause=cause,
            fix=fix,
            evidence=_compared(here, there),
            at=min(h.rank.wall(h.origin.at) for h in lists),
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
    yield from (lists for lists in found.values() if len(lists) > 1)


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


def _compared(here: ParameterList, there: ParameterList) -> Evidence:
    places = _differences(here.parameters, there.parameters)
    longest = max(len(here.parameters), len(there.parameters))
    return {
        "differences": f"{len(places)} of {longest} parameters",
        "parameters": [
            {
                "position": i,
                f"rank {here.rank.rank}": _described(_at(here.parameters, i)),
                f"rank {there.rank.rank}": _described(_at(there.parameters, i)),
            }
            for i in places[:REPORTED]
        ],
    }


def _in(made: Location) -> str:
    """`in build (train.py:12)`, or `at train.py:12` outside of functions."""
    named = made.function and not made.function.startswith("<")
    return f"in {made.function} ({made})" if named else f"at {made}"


def _signature(parameter: Tensor) -> tuple[object, ...]:
    return parameter.name, parameter.shape, parameter.dtype, parameter.trainable


def _at(parameters: Sequence[Tensor], place: int) -> Tensor | None:
    return parameters[place] if place < len(parameters) else None


def _differences(here: Sequence[Tensor], there: Sequence[Tensor]) -> list[int]:
    """Positions at which two lists differ."""

    def differ(i: int) -> bool:
        one, other = _at(here, i), _at(there, i)
        return one is None or other is None or _signature(one) != _signature(other)

    return [i for i in range(max(len(here), len(there))) if differ(i)]


def _difference(
    lists: list[ParameterList], here: ParameterList, there: ParameterList, place: int
) -> str:
    """What differs at a position, in a few words."""
    one, other = _at(here.parameters, place), _at(there.parameters, place)
    if one is None or other is None:
        return "not on every rank"
    if one.name != other.name:
        return "another parameter at this position"
    if one.shape != other.shape:
        return f"shape {_shape(one)} vs {_shape(other)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} vs {other.dtype}"
    ranks: dict[bool, list[int]] = {True: [], False: []}
    for each in lists:
        if (parameter := _at(each.parameters, place)) is not None:
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


def _rule(here: ParameterList, there: ParameterList) -> str:
    """The rule by which two lists of one model differ: names come before properties."""
    names, others = ([p.name for p in each.parameters] for each in (here, there))
    if set(names) != set(others):
        return "different-names"
    if names != others:
        return "parameter-order"
    return PROPERTY_RULES[_differing_properties(here, there)[0]]


def _cause(here: ParameterList, there: ParameterList, rule: str) -> tuple[str, str]:
    """Cause and fix."""
    if rule == "different-names":
        return (
            "the ranks built the model from different arguments, or took different branches",
            "build the model from the same arguments, and take the same branches, on every rank: "
            "no layer may depend on the rank or its data",
        )
    if rule == "parameter-order":
        effect = (
            "DDP broadcasts and reduces by position, so it mixes them"
            if isinstance(here.origin, Wrapped)
            else "collectives match by the order of their calls, so gradients that are reduced in "
            "the order of the parameters are mixed"
        )
        return (
            "the same layers are registered in another order (from a set, a directory listing, a "
            f"hash): {effect}",
            "register layers in the same order on every rank: `for name in sorted(names)`, not "
            "`for name in set(names)`",
        )
    differing = _differing_properties(here, there)
    what = listed([PROPERTIES[name] for name in differing])
    return (
        f"the parameters have the same names in the same order, but {what}",
        PROPERTY_FIXES[differing[0]],
    )


def _differing_properties(here: ParameterList, there: ParameterList) -> list[str]:
    """Which of `PROPERTIES` differ between two lists with equal names."""
    pairs = list(zip(here.parameters, there.parameters, strict=True))
    return [n for n in PROPERTIES if any(getattr(p, n) != getattr(q, n) for p, q in pairs)]


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
