"""DDP309."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_order import WrapOrder, apart
from ddpdoctor.events import Tensor, Unwrapped, UnwrappedState, Wrapped
from ddpdoctor.report.findings import Check, Evidence, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, ranks_text

REPORTED = 12
"""Rows of the table of differences."""

PROPERTIES = {
    "shape": "of the same shapes",
    "dtype": "of the same dtypes",
    "trainable": "frozen alike",
}
FIXES = {
    "shape": "give the layers the same sizes on every rank: a size that is counted from data must "
    "be counted over all of it, or on rank 0 and broadcast, before the model is built",
    "dtype": "convert the model to the same dtype on every rank before it is wrapped: "
    "`model.to(dtype)`",
    "trainable": "freeze the same parameters on every rank, or on none, before the wrap",
}
"""What to do, by what differs where the names do not."""


@dataclass(frozen=True)
class Held:
    """One rank's list of parameters.

    Attributes:
        origin: the record it stands in.
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
    Lists of parameters that are not the same on all ranks of a group when the model is wrapped (or,
    where gradients are reduced by hand, when the optimizer first steps): other names, another
    order, other shapes or dtypes, frozen here and trained there. Also the same models wrapped in
    another order.

    ## How it knows
    As the wrapper is made, before it communicates, each rank records the list of the model's
    parameters: names, shapes, dtypes and which of them are trained. Of a model without a wrapper it
    is the list that the optimizer holds at its first step. Lists of the ranks of one group are
    compared position by position, and the lines that made the models wrapped at one number. The
    finding is proven.

    ## Why it hurts
    DDP broadcasts and reduces by position. Where the shapes differ the constructor raises or
    hangs; where they happen to agree (layers registered from a `set`, or in the order of a
    directory listing) it mixes the weights and gradients of different layers in silence.

    ## How to fix it
    Build the model from the same arguments on every rank, and register layers in a fixed order:
    `for name in sorted(names)`; so are several models to be wrapped. Compute sizes from all of the
    data, or on rank 0 and broadcast them; convert to one dtype, freeze on every rank or on none,
    before the wrap.

    ## When it stays quiet
    Parameters in `_ddp_params_and_buffers_to_ignore`; models of different groups (pipeline stages,
    experts); equal lists.
    """

    code = "DDP309"
    name = "model-mismatch"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if run.world_size < 2:
            return "one rank only"
        return None if run.any(Wrapped) or run.any(Unwrapped) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        turned: set[tuple[int, ...]] = set()
        for held in [*_wrapped(run), *_reduced_by_hand(run)]:
            ranks = tuple(h.rank.rank for h in held)
            majority, others = _sides(held)
            if not others:
                continue
            origins = _origins(majority[0], others[0])
            if origins is None:
                yield self._report(run, held, majority, others)
            elif not origins.reordered or ranks not in turned:
                yield self._report_origins(held, majority, others, origins)
                if origins.reordered:
                    turned.add(ranks)

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
        self, held: list[Held], majority: list[Held], others: list[Held], origins: WrapOrder
    ) -> Finding:
        """Other models, or the same ones in another order."""
        here, there = majority[0], others[0]
        clear = 2 * len(majority) > len(held)
        who = [ranks_text(ranks) for ranks in ([h.rank.rank for h in majority], [there.rank.rank])]
        what = "their models in another order" if origins.permuted else "different models"
        which = f"number {here.number + 1}" if here.number else "the first"
        lines = [Related(f"the model of {w}", at) for w, at in zip(who, origins.made, strict=True)]
        wrapped = origins.loop or there.rank.location(there.origin.site)
        if not origins.reordered and wrapped is not None:
            lines = [lines[1], lines[0], Related("wrapped here", wrapped)]
            wrapped = origins.made[1]
        return self.finding(
            ranks=tuple(h.rank.rank for h in (others if clear else held)),
            subjects=tuple(dict.fromkeys((here.origin.kind, there.origin.kind))),
            location=wrapped,
            label="not the same model on all ranks",
            related=tuple(r for r in lines if r.location != wrapped),
            summary=f"ranks wrap {what}: {which} is the {here.origin.kind} made "
            f"{_in(origins.made[0])} on {who[0]}, and the {there.origin.kind} made "
            f"{_in(origins.made[1])} on {who[1]}",
            cause=origins.cause,
            fix=origins.fix,
            fix_kind=FixKind.CHECK,
            evidence=_compared(here, there),
            at=min(h.rank.wall(h.origin.at) for h in held),
        )

    def _report(
        self, run: Run, held: list[Held], majority: list[Held], others: list[Held]
    ) -> Finding:
        here, there = majority[0], others[0]
        places = _differences(here.parameters, there.parameters)
        first = places[0]
        clear = 2 * len(majority) > len(held)
        odd = there if first < len(there.parameters) else here
        if (frozen := _at(here.parameters, first)) is not None and not frozen.trainable:
            odd = here
        cause, fix = _cause(here, there)
        what = _difference(held, here, there, first)
        kind = here.origin.kind or "the model"
        origin = "wrapped here" if isinstance(odd.origin, Wrapped) else "made here"
        return self.finding(
            ranks=tuple(h.rank.rank for h in (others if clear else held)),
            subjects=tuple(
                dict.fromkeys(p.name for i in places[:REPORTED] if (p := _at(odd.parameters, i)))
            ),
            location=_made_at(odd, first),
            label=f"differs: {what}",
            related=models.related(odd.rank, ((origin, odd.origin.site),)),
            summary=f"{kind} is not the same model on all ranks: parameter {first} is "
            f"{_told(_at(here.parameters, first))} on rank {here.rank.rank} and "
            f"{_told(_at(there.parameters, first))} on rank {there.rank.rank}",
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence=_compared(here, there),
            at=min(h.rank.wall(h.origin.at) for h in held),
        )


def _wrapped(run: Run) -> Iterator[list[Held]]:
    """The n-th models that ranks wrapped for one group of ranks."""
    found: dict[tuple[object, ...], list[Held]] = {}
    for rank in run.ranks.values():
        counts: Counter[tuple[int, ...]] = Counter()
        for wrapped in rank.of(Wrapped):
            _, ranks = models.members(rank, wrapped)
            listed = tuple(p for p in wrapped.parameters if not p.ignored)
            held = Held(rank, wrapped, listed, counts[ranks])
            found.setdefault((ranks, held.number), []).append(held)
            counts[ranks] += 1
    for (members, _), each in found.items():
        if len(each) > 1 and members:
            yield each


def _reduced_by_hand(run: Run) -> Iterator[list[Held]]:
    """Models of no wrapper whose gradients the ranks of the default group reduce themselves, as
    each optimizer held them first, then after parameters were added to it, and so on."""
    found: dict[tuple[int, int], list[Held]] = {}
    for rank in run.ranks.values():
        reducing = {s.optimizer for s in rank.of(UnwrappedState) if s.exchanged == "gradients"}
        reported: Counter[int] = Counter()
        for event in rank.of(Unwrapped):
            if event.optimizer in reducing:
                held = Held(rank, event, event.parameters)
                found.setdefault((event.optimizer, reported[event.optimizer]), []).append(held)
                reported[event.optimizer] += 1
    yield from (held for held in found.values() if len(held) > 1)


def _sides(held: list[Held]) -> tuple[list[Held], list[Held]]:
    """Those with the model that most have, and the others: it has other parameters, or as many from
    another line while each rank wraps the other's later."""
    usual, _ = Counter(h.signature() for h in held).most_common(1)[0]
    majority = [h for h in held if h.signature() == usual]
    others = [h for h in held if h.signature() != usual]
    if others or len(held) < 2:
        return majority, others
    turned = [h for h in held if (found := _apart(held[0], h)) is not None and found.permuted]
    return [h for h in held if h not in turned], turned


def _apart(here: Held, there: Held) -> WrapOrder | None:
    if isinstance(here.origin, Wrapped) and isinstance(there.origin, Wrapped):
        return apart((here.rank, here.origin), (there.rank, there.origin))
    return None


def _origins(here: Held, there: Held) -> WrapOrder | None:
    """The lines of models that are not one model with other dtypes, or frozen on some ranks."""
    found = _apart(here, there)
    layers = [[(p.name, p.shape) for p in held.parameters] for held in (here, there)]
    return found if found and (found.permuted or layers[0] != layers[1]) else None


def _compared(here: Held, there: Held) -> Evidence:
    places = _differences(here.parameters, there.parameters)
    longest = max(len(here.parameters), len(there.parameters))
    return {
        "differences": f"{len(places)} of {longest} parameters",
        "parameters": [
            {
                "position": i,
                f"rank {here.rank.rank}": _told(_at(here.parameters, i)),
                f"rank {there.rank.rank}": _told(_at(there.parameters, i)),
            }
            for i in places[:REPORTED]
        ],
    }


def _in(made: Location) -> str:
    named = made.function and not made.function.startswith("<")
    return f"in {made.function} ({made})" if named else f"at {made}"


def _signature(parameter: Tensor) -> tuple[object, ...]:
    return parameter.name, parameter.shape, parameter.dtype, parameter.trainable


def _at(parameters: Sequence[Tensor], place: int) -> Tensor | None:
    return parameters[place] if place < len(parameters) else None


def _differences(here: Sequence[Tensor], there: Sequence[Tensor]) -> list[int]:
    def differ(i: int) -> bool:
        one, other = _at(here, i), _at(there, i)
        return one is None or other is None or _signature(one) != _signature(other)

    return [i for i in range(max(len(here), len(there))) if differ(i)]


def _difference(held: list[Held], here: Held, there: Held, place: int) -> str:
    one, other = _at(here.parameters, place), _at(there.parameters, place)
    if one is None or other is None:
        return "not on every rank"
    if one.name != other.name:
        return "another parameter at this position"
    if one.shape != other.shape:
        return f"shape {_shape(one)} against {_shape(other)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} against {other.dtype}"
    ranks: dict[bool, list[int]] = {True: [], False: []}
    for each in held:
        if (parameter := _at(each.parameters, place)) is not None:
            ranks[parameter.trainable].append(each.rank.rank)
    return f"frozen on {ranks_text(ranks[False])}, trained on {ranks_text(ranks[True])}"


def _told(parameter: Tensor | None) -> str:
    if parameter is None:
        return "absent"
    frozen = "" if parameter.trainable else " frozen"
    return f"{parameter.name} {_shape(parameter)} {parameter.dtype}{frozen}"


def _shape(parameter: Tensor) -> str:
    return "x".join(map(str, parameter.shape)) or "scalar"


def _cause(here: Held, there: Held) -> tuple[str, str]:
    """Why they differ, and what to change."""
    names, others = ([p.name for p in held.parameters] for held in (here, there))
    if set(names) != set(others):
        return (
            "the ranks built the model from different arguments or by different branches",
            "build the model from the same arguments, by the same branches, on every rank: what "
            "decides on a layer must not be a rank's own",
        )
    if names != others:
        effect = (
            "DDP broadcasts and reduces by position, so it mixes them"
            if isinstance(here.origin, Wrapped)
            else "collectives are matched by the order of their calls, so that gradients reduced "
            "in the order of the parameters are mixed"
        )
        return (
            "the same layers were registered in another order (from a set, a directory listing, a "
            f"hash): {effect}",
            "register layers in the same order on every rank: `for name in sorted(names)`, not "
            "`for name in set(names)`",
        )
    unlike = _unlike(here, there)
    properties = " and ".join(PROPERTIES[name] for name in unlike)
    return f"the layers are the same in the same order, but not {properties}", FIXES[unlike[0]]


def _unlike(here: Held, there: Held) -> list[str]:
    """Of what kind the differences are between equal lists of names."""
    pairs = list(zip(here.parameters, there.parameters, strict=True))
    return [n for n in PROPERTIES if any(getattr(p, n) != getattr(q, n) for p, q in pairs)]


def _made_at(held: Held, place: int) -> Location | None:
    origin = held.origin
    if isinstance(origin, Wrapped):
        if not held.parameters[place].trainable and origin.frozen_site >= 0:
            return held.rank.location(origin.frozen_site)
        name = held.parameters[place].name
        position = next(i for i, p in enumerate(origin.parameters) if p.name == name)
        part = models.parts_of(origin, [position])[0]
        owner = models.Part(name.rpartition(".")[0], part.kind, (position,), False)
        return models.made_at(held.rank, origin, owner)
    return held.rank.location(origin.site)
