"""DDP801: where the first NaN or infinity came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.events import NonFinite, ScalerStep, Sketch, Wrapped
from ddpdoctor.report.declarations import COPIES_DIFFER, Condition, Effect, When
from ddpdoctor.report.evidence_names import FINITE_ON
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, listed, plural, whom

_EARLIEST = (("input", "buffer"), ("parameter",), ("loss", "gradient"))
"""Kinds in the order in which they come about within a step. Of several ranks those with the
earliest kind are named: a loss may be NaN by what the forward got from another rank."""

_PASSING_ON = ("add", "sub", "mul", "sum", "mean", "cat", "stack", "masked_fill", "where")
"""Operations that rarely produce NaN or infinity from finite input. The graph keeps little of their
inputs, so that it cannot be told whether these were finite."""

HUGE, GROWN = 1e6, 1e3
"""Parameters have exploded if one is above both `HUGE` and `GROWN` times their earlier norm."""

EXPLODED = "parameters-exploded"
INPUT = "input"
AFTER_FORWARD = "after-forward"
BEFORE_OPERATION = "before-operation"
DERIVATIVE = "derivative"
UNKNOWN_OPERATION = "operation-unknown"
PASSED_ON = "passed-on"
OPERATION = "operation"
GRADIENT = "gradient"
EARLIER_GRADIENT = "gradient-of-earlier-step"
AT_START = "parameter-at-start"
PARAMETER = "parameter"

_SKIP = "skip the step on all ranks when a value is not finite"


def _holds_nan(value: object) -> bool:
    """Whether a figure of evidence is NaN, or one inside its lists and tables."""
    if isinstance(value, Mapping):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_nan, value))
    return value == "nan" or (isinstance(value, float) and math.isnan(value))


class NonfiniteOrigin(Check):
    """Where the first NaN or infinity came from

    ## What it finds
    The rank and the step of the first NaN or infinity, before averaging spread it to all ranks: in
    the inputs of the wrapped forward, in the loss (with the operation and the module that produced
    it), or in a rank's own gradients while its loss is finite. Also a NaN loss whose gradients are
    finite, as of the logarithm of a negative number.

    ## How it knows
    The loss is checked in every backward. Some of the rank's own gradients are checked before they
    are averaged: of about 30 parameters in the first 128 backwards, later mostly of one, as
    `--budget` allows. A loss that is not finite is followed back at once, to parameters, inputs and
    buffers of the forward, or along the autograd graph to an operation. It is reported if an
    optimizer steps on it, or if no optimizer steps any more because of it.

    On a GPU nothing waits for the device: the loss and one gradient are flagged there and read at a
    later step. This gives the rank and the step, but not the operation. The finding is proven.

    ## Why it hurts
    One step later all parameters of every rank are NaN, and nothing shows any more that it began
    with one bad sample on one rank.

    ## How to fix it
    It depends on the origin: clean the sample that is named; keep invalid values from the operation
    (`log(x.clamp_min(eps))`, `x / (norm + eps)`, `sqrt(x + eps)`); lower the learning rate or clip
    gradients if the parameters exploded; skip steps that are not finite on *all* ranks.

    ## When it stays quiet
    - steps that a GradScaler skips, and losses on which no optimizer steps (unless the loss is NaN,
      or parameters are not finite, in one backward after another)
    - infinities inside the model (masks) that do not reach the loss
    - the mean of an empty tensor, whose gradients are finite
    """

    code = "DDP801"
    name = "nonfinite-origin"
    family = "numerics"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        EXPLODED: "parameters grew beyond all bounds before",
        INPUT: "an input of the wrapped forward is not finite",
        AFTER_FORWARD: "a constant that enters the loss after the model's forward is not finite",
        BEFORE_OPERATION: "an operation of the forward gets a constant that is not finite",
        DERIVATIVE: "a derivative that `torch.autograd.grad` takes for the loss is not finite",
        UNKNOWN_OPERATION: "the graph does not show which operation of the loss produced it",
        PASSED_ON: "the loss gets it from an operation that probably only passed it on",
        OPERATION: "an operation produced it from finite input",
        GRADIENT: "gradients of the rank are not finite, while its loss is",
        EARLIER_GRADIENT: "parameters are not finite after a step with such gradients",
        AT_START: "parameters or buffers are not finite before the first step",
        PARAMETER: "parameters or buffers are not finite after a step",
    }
    effects = (
        Effect(
            COPIES_DIFFER,
            when=(
                When.STEP_NOT_BEFORE,
                Condition(
                    "that shows NaN",
                    lambda _, other: other.steps is not None and _holds_nan(other.evidence),
                ),
            ),
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        seen = run.training_ranks() or any(_first(r) for r in run.ranks.values())
        return None if seen else "no optimizer step seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        firsts = {r: e for r in run.ranks.values() if (e := _first(r)) is not None}
        if not firsts:
            return
        spreading = {r: e for r, e in firsts.items() if not e.spared}
        firsts = spreading or firsts
        begin = min(_when(e) for e in firsts.values())
        now = {r: e for r, e in firsts.items() if _when(e) == begin}
        if all(e.skipped for e in now.values()):  # no steps tell them apart
            early = min(e.backward for e in now.values())
            now = {r: e for r, e in now.items() if e.backward == early}
        kinds = next((k for k in _EARLIEST if any(e.kind in k for e in now.values())), ())
        guilty = {r: e for r, e in now.items() if e.kind in kinds} or now
        rank, event = min(guilty.items(), key=lambda item: item[1].kind == "gradient")
        spot, step = _line(rank, event), event.step - _brought(event)
        origin, exploded = _origin(event), _exploded(event, rank)
        last = max((r.steps for r in run.training_ranks()), default=step + 1) - 1
        steps = Steps(step, max(step, last), max(step, last) - step + 1)
        if event.spared:
            steps = Steps(step, event.last, event.spared)
        yield self.finding(
            rule=EXPLODED if exploded else origin,
            ranks=tuple(r.rank for r in guilty),
            steps=steps,
            subjects=event.names,
            location=spot,
            label=_label(origin, event),
            related=_related(rank, event, spot),
            summary=_summary(origin, event, guilty, run),
            cause=(exploded or _cause(origin, event, rank)) + _no_more_steps(event),
            fix=_FIXES[EXPLODED] if exploded else _fix(origin, event, rank),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "first seen": [_row(r, e) for r, e in firsts.items()],
                "first not finite": event.kind,
                "operation": event.operation,
                "module": event.within or event.module,
                "rows of the batch": list(event.rows),
                "backwards without a step": event.skipped or "",
                "brought by a gradient of step": step if _brought(event) else "",
                FINITE_ON: [
                    r.rank for r in run.training_ranks() if _brought(event) and r not in firsts
                ],
                **({"largest parameter": event.largest} if exploded else {}),
            },
            at=rank.wall(event.at),
        )


def _first(rank: Rank) -> NonFinite | None:
    """The first non-finite value of a rank that mattered: a step was taken on it, no step was taken
    any more, or the program failed. One that left the gradients finite counts only if there is no
    other."""
    failed = rank.exception is not None
    mattered = [e for e in rank.of(NonFinite) if e.applied or e.skipped or failed]
    spared = [e for e in mattered if e.spared]
    return next((e for e in mattered if not e.spared), spared[-1] if spared else None)


def _when(event: NonFinite) -> int:
    """Steps of all optimizers before it, by which ranks are compared; of its own in old records."""
    return event.total if event.total >= 0 else event.step


def _brought(event: NonFinite) -> bool:
    """Whether parameters got it by a gradient of the step before; of which rank is not known."""
    return event.kind == "parameter" and event.gradients and event.step > 0


def _exploded(event: NonFinite, rank: Rank) -> str:
    """How far the parameters have exploded, in a sentence; empty if they have not."""
    early: dict[tuple[int, int], Sketch] = {}
    for sketch in rank.of(Sketch):
        if sketch.kind == "parameters" and sketch.step < event.step:
            early.setdefault((sketch.model, sketch.optimizer), sketch)
    was = max(early.values(), key=lambda s: s.norm, default=None)
    if was is None or event.largest < max(HUGE, was.norm * GROWN):
        return ""
    return (
        f"the parameters exploded: one is {event.largest:.0e}, while the norm of all was "
        f"{was.norm:.2g} at step {was.step}; values computed from them overflow their dtype"
    )


def _no_more_steps(event: NonFinite) -> str:
    if not event.skipped:
        return ""
    since = f"backward {event.backward} (zero-based)" if event.backward >= 0 else "then"
    return (
        f"; from {since} on no step is taken ({event.skipped} backwards in a row were seen): no "
        "loss scale helps"
    )


def _line(rank: Rank, event: NonFinite) -> Location | None:
    """The line nearest to the origin that is known."""
    for site in (event.origin_site, event.site, event.forward_site):
        if (found := rank.location(site)) is not None:
            return found
    return None


def _origin(event: NonFinite) -> str:
    """The rule that says where a value came from, explosions aside.

    `entered` and `beyond` come before the operation, since they mean that the graph was followed
    past it, to a constant.
    """
    if event.kind in (INPUT, GRADIENT):
        return event.kind
    if event.kind == "loss":
        if event.beyond or event.entered:
            return AFTER_FORWARD if event.beyond else BEFORE_OPERATION
        if event.derivative_site >= 0:
            return DERIVATIVE
        if not event.operation:
            return UNKNOWN_OPERATION
        return PASSED_ON if event.operation in _PASSING_ON else OPERATION
    if _brought(event):
        return EARLIER_GRADIENT
    return PARAMETER if event.step else AT_START


def _of(event: NonFinite) -> str:
    return f" of {event.operation}" if event.operation else ""


def _label(origin: str, event: NonFinite) -> str:
    value = _value(event)
    if origin == INPUT:
        return f"gets {value}"
    if origin == DERIVATIVE:
        return f"{value} in the derivative{_of(event)}"
    if origin == AFTER_FORWARD:
        here = event.origin_site >= 0
        return f"{event.entered} gets {value} " + ("here" if here else "before this line")
    if origin == BEFORE_OPERATION:
        return f"{value} arises here, before {event.module or event.entered}"
    if origin == OPERATION:
        return f"{event.operation} returns {value}"
    if event.kind == "loss":
        return f"{value} in the loss"
    return f"{value} in a {event.kind}"


def _value(event: NonFinite) -> str:
    return {"nan": "NaN", "inf": "infinity"}.get(event.value, "NaN or infinity")


def _related(rank: Rank, event: NonFinite, spot: Location | None) -> tuple[Related, ...]:
    places = (
        ("the derivative is taken here", rank.location(event.derivative_site)),
        (
            "its backward" if event.spared else "the backward that spread it",
            rank.location(event.site),
        ),
    )
    return tuple(Related(what, at) for what, at in places if at is not None and at != spot)


def _summary(origin: str, event: NonFinite, guilty: dict[Rank, NonFinite], run: Run) -> str:
    ranks = whom((r.rank for r in guilty), len(run.training_ranks()))
    shown = event.names[:2]
    more = event.count - len(shown)  # a record holds the first names only
    names = listed([*shown, f"{more} more"] if more > 0 else shown)
    of_names = f" ({names})" if names else ""
    value = _value(event)
    if origin == INPUT:
        return f"the first {value} is in the input of {ranks} at step {event.step}{of_names}"
    if origin == GRADIENT:
        where = f", from {event.names[0]} towards the input" if event.names else ""
        return (
            f"the first {value} is in the gradients of {ranks} at step {event.step}{where}, while "
            "the loss is finite"
        )
    if origin == EARLIER_GRADIENT:
        return (
            f"parameters of {ranks} are not finite after step {event.step - 1}{of_names}: the "
            "gradients of that step were not, while the loss was"
        )
    if origin in (PARAMETER, AT_START):
        return f"{event.kind}s of {ranks} are not finite at step {event.step}{of_names}"
    return f"the first {value} is in the loss of {ranks} at step {event.step}{_way(origin, event)}"


def _way(origin: str, event: NonFinite) -> str:
    """By what a loss got its value: `: produced by log in norm`."""
    after = f" after `{event.module}`" if event.operation and event.module else ""
    if event.operation and event.within:
        after = f" in `{event.within}`"
    if origin == AFTER_FORWARD:
        return f": a constant of `{event.entered}` has it, after the model's forward{after}"
    if origin == BEFORE_OPERATION:
        source = f", made in `{event.within}`," if event.within else ""
        return f": a constant{source} brings it into `{event.module or event.entered}`{after}"
    if origin == DERIVATIVE:
        return f": it arises in the derivative{_of(event)}{after}"
    if origin == PASSED_ON:
        return f": it comes out of `{event.operation}`{after}"
    if origin == OPERATION:
        return f": `{event.operation}` produces it{after}"
    return after


def _cause(origin: str, event: NonFinite, rank: Rank) -> str:
    if origin == INPUT:
        rows = listed(event.rows)
        where = f", in {plural(len(event.rows), 'row')} {rows} of the batch" if event.rows else ""
        verb = "was" if len(event.names) == 1 else "were"
        return f"{listed(event.names)} {verb} not finite before the forward{where}"
    if origin == AFTER_FORWARD:
        finite = " and the model's output" if event.beyond == "finite" else ""
        return (
            f"{_finite(rank, finite)}; after the forward `{event.entered}` got a constant (it "
            "requires no gradient) that was not finite"
        )
    if origin == BEFORE_OPERATION:
        into = f" of {event.module}" if event.module else ""
        came = "" if rank.of(Wrapped) else "came with the inputs or "
        return (
            f"{_finite(rank)}; `{event.entered}`{into} got a constant (it requires no gradient) "
            f"that was not finite: it {came}arose on the way there"
        )
    if origin == DERIVATIVE:
        what = f"that of `{event.operation}`" if event.operation else "one"
        return (
            "inputs, parameters and the forward were finite; of the derivatives that "
            f"`torch.autograd.grad` takes for the loss, {what} was not"
        )
    if origin == UNKNOWN_OPERATION:
        return (
            "it arose on the way to the loss; the graph does not show by which operation, as "
            "sharded or checkpointed parts are not unpacked"
        )
    if origin == PASSED_ON:
        return (
            f"{_finite(rank)}; the graph does not show what `{event.operation}` got: it may have "
            "come from an earlier operation"
        )
    if origin == OPERATION:
        wrong = "; its derivative there is finite, so the gradients are finite but wrong"
        return (
            f"{_finite(rank)}; `{event.operation}` got values for which it is not defined"
            f"{wrong if event.spared else ''}"
        )
    if origin == GRADIENT:
        return (
            "an operation has no finite derivative at its input (sqrt or norm of zero, a masked "
            "branch that is not finite, the backward of a custom `autograd.Function`); averaging "
            "then spread it to every rank"
        )
    if origin == EARLIER_GRADIENT:
        return (
            "the optimizer's state is not finite either, so a gradient was not; the rank is not "
            "known, since not all gradients are checked before they are averaged"
        )
    if origin == AT_START:
        return (
            "they were not finite before the first step: their initialisation or a checkpoint made "
            "them so"
        )
    return (
        "the step before made them so: by a gradient that was not finite (not all are checked), by "
        "the optimizer itself, or by an overflow of the dtype"
    )


def _finite(rank: Rank, more: str = "") -> str:
    """What is known to have been finite; of inputs only those of a wrapper are seen."""
    inputs = "inputs" if rank.of(Wrapped) else ""
    if more:
        return f"{inputs and inputs + ', '}parameters{more} were finite"
    return f"{inputs and inputs + ' and '}parameters were finite"


_FIXES = {
    EXPLODED: "lower the learning rate, clip gradients (`clip_grad_norm_`), or look for what makes "
    "the loss so large",
    INPUT: "clean the sample, or use `x = torch.nan_to_num(x)` if that is what it means",
    DERIVATIVE: "run it under `torch.autograd.detect_anomaly()`, which names the operation, and "
    "keep its input away from points without a finite derivative",
    AT_START: "initialise every parameter (after `to_empty()` each module needs its "
    "`reset_parameters()`), or check what was loaded",
    PARAMETER: "lower the learning rate, clip gradients (`clip_grad_norm_`), or check what was "
    "loaded",
}
_OTHERWISE = f"keep such values from the operation (`x.clamp_min(eps)`), and {_SKIP}"

_SAFE_DERIVATIVES = {
    "sqrt": "`x.clamp_min(1e-12).sqrt()`: its derivative at 0 is infinite",
    "pow": "`x.clamp_min(1e-12) ** p`: its derivative at 0 is infinite",
    "acos": "`x.clamp(-1 + 1e-6, 1 - 1e-6).acos()`: its derivative at 1 and -1 is infinite",
    "asin": "`x.clamp(-1 + 1e-6, 1 - 1e-6).asin()`: its derivative at 1 and -1 is infinite",
}

_MASKED = (
    "a fully masked row gives NaN: use `x.masked_fill(mask, torch.finfo(x.dtype).min)` in place of "
    "`-inf`, or leave out such rows"
)
_SAFE_OPERATIONS = {
    "log": "`torch.log(x.clamp_min(1e-8))`",
    "div": "`a / b.clamp_min(1e-8)`, or `a / (b + eps)`",
    "sqrt": "`torch.sqrt(x.clamp_min(1e-8))`",
    "pow": "`x.clamp_min(1e-8) ** p`",
    "softmax": _MASKED,
    "log_softmax": _MASKED,
}
"""By operation, how to keep it defined, and its derivative finite."""


def _fix(origin: str, event: NonFinite, rank: Rank) -> str:
    if origin == EARLIER_GRADIENT:
        return _fix_of_gradients(rank)
    if origin == DERIVATIVE and event.operation in _SAFE_DERIVATIVES:
        return _SAFE_DERIVATIVES[event.operation]
    if event.kind == "loss" and origin != DERIVATIVE:
        if event.operation in _SAFE_OPERATIONS:
            return _SAFE_OPERATIONS[event.operation]
        if origin in (AFTER_FORWARD, PASSED_ON):
            return (
                f"check what `{event.entered or event.operation}` gets (`assert "
                f"torch.isfinite(x).all()` on the way there), and {_SKIP}"
            )
    return _FIXES.get(origin, _OTHERWISE)


def _fix_of_gradients(rank: Rank) -> str:
    if rank.of(Wrapped):
        return f"run again with `--every 1` to learn the rank; {_SKIP}"
    if rank.of(ScalerStep):
        return (
            "all-reduce the gradients before `scaler.unscale_(optimizer)` or "
            "`scaler.step(optimizer)`: NaN that other ranks add later is not checked, but applied"
        )
    return f"check each rank's gradients before they are all-reduced; {_SKIP}"


def _row(rank: Rank, event: NonFinite) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "step": event.step,
        "in": event.kind,
        "names": ", ".join(event.names[:3]),
    }
