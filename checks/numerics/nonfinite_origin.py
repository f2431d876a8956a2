"""DDP801: where the first NaN or infinity came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddpdoctor.events import NonFinite, ScalerStep, Sketch, Wrapped
from ddpdoctor.events.numerics import ROWS_RECORDED
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

STOPPED_ON = "stopped before the backward on ranks"
"""Name of the evidence which ranks raised or exited because of such a loss."""

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

_SKIP = (
    "skip the step on all ranks when a value is not finite on any of them (`all_reduce` a flag "
    "with `ReduceOp.MAX`)"
)
_OTHERWISE = f"keep such values from the operation (`x.clamp_min(eps)`), and {_SKIP}"
_CHECK_CONSTANT = (
    f"check what `{{got}}` gets (`assert torch.isfinite(x).all()` on the way there), and {_SKIP}"
)
_LOWER_RATE = "lower the learning rate, clip gradients (`clip_grad_norm_`), or "


@dataclass(frozen=True)
class Origin:
    """What is said of one origin; `_facts` fills the braces in."""

    when: str
    label: str
    summary: str
    cause: str
    fix: str = _OTHERWISE


_IN_LOSS = "the first {value} is in the loss of {ranks} at step {step}"
_NOT_FINITE = "{kind}s of {ranks} are not finite at step {step}{names}"

ORIGINS = {
    INPUT: Origin(
        "an input of the wrapped forward is not finite",
        "gets {value}",
        "the first {value} is in the input of {ranks} at step {step}{names}",
        "{inputs} not finite before the forward{rows}",
        "clean the sample, or use `x = torch.nan_to_num(x)` if that is what it means",
    ),
    AFTER_FORWARD: Origin(
        "a tensor without a gradient that enters the loss after the model's forward is not finite",
        "{entered} gets {value} {place}",
        f"{_IN_LOSS}: after the model's forward, `{{entered}}` gets it in a tensor without a "
        "gradient, such as a target{after}",
        "{finite}; after the forward `{entered}` got a tensor that requires no gradient (a target, "
        "a mask, a weight) and was not finite",
        _CHECK_CONSTANT,
    ),
    BEFORE_OPERATION: Origin(
        "an operation of the forward gets a tensor without a gradient that is not finite",
        "{value} arises here, before {into}",
        f"{_IN_LOSS}: a tensor without a gradient{{made}} brings it into `{{into}}`{{after}}",
        "{finite}; `{entered}`{of_module} got a tensor that requires no gradient (an input, a "
        "mask) and was not finite: it {came}arose on the way there",
    ),
    DERIVATIVE: Origin(
        "a derivative that `torch.autograd.grad` takes for the loss is not finite",
        "{value} in the derivative{of}",
        f"{_IN_LOSS}: it arises in the derivative{{of}}{{after}}",
        "inputs, parameters and the forward were finite; of the derivatives that "
        "`torch.autograd.grad` takes for the loss, {which} was not",
        "run it under `torch.autograd.detect_anomaly()`, which names the operation, and keep its "
        "input away from points without a finite derivative",
    ),
    UNKNOWN_OPERATION: Origin(
        "the graph does not show which operation of the loss produced it",
        "{value} in the loss",
        f"{_IN_LOSS}{{after}}",
        "it arose on the way to the loss; the graph does not show by which operation, as sharded "
        "or checkpointed parts are not unpacked",
    ),
    PASSED_ON: Origin(
        "the loss gets it from an operation that probably only passed it on",
        "{value} in the loss",
        f"{_IN_LOSS}: it comes out of `{{operation}}`{{after}}",
        "{finite}; the graph does not show what `{operation}` got: it may have come from an "
        "earlier operation",
        _CHECK_CONSTANT,
    ),
    OPERATION: Origin(
        "an operation produced it from finite input",
        "{operation} returns {value}",
        f"{_IN_LOSS}: `{{operation}}` produces it{{after}}",
        "{finite}; `{operation}` got values for which it is not defined{wrong}",
    ),
    GRADIENT: Origin(
        "gradients of the rank are not finite, while its loss is",
        "{value} in a gradient",
        "the first {value} is in the gradients of {ranks} at step {step}{towards}, while the loss "
        "is finite",
        "an operation has no finite derivative at its input (sqrt or norm of zero, a masked branch "
        "that is not finite, the backward of a custom `autograd.Function`); averaging then spread "
        "it to every rank",
    ),
    EARLIER_GRADIENT: Origin(
        "parameters are not finite after a step with such gradients",
        "{value} in a parameter",
        "parameters of {ranks} are not finite after step {before}{names}: the gradients of that "
        "step were not, while the loss was",
        "the optimizer's state is not finite either, so a gradient was not; the rank is not known, "
        "since not all gradients are checked before they are averaged",
    ),
    AT_START: Origin(
        "parameters or buffers are not finite before the first step",
        "{value} in a {kind}",
        _NOT_FINITE,
        "they were not finite before the first step: their initialisation or a checkpoint made "
        "them so",
        "initialise every parameter (after `to_empty()` each module needs its "
        "`reset_parameters()`), or check what was loaded",
    ),
    PARAMETER: Origin(
        "parameters or buffers are not finite after a step",
        "{value} in a {kind}",
        _NOT_FINITE,
        "the step before made them so: by a gradient that was not finite (not all are checked), by "
        "the optimizer itself, or by an overflow of the dtype",
        f"{_LOWER_RATE}check what was loaded",
    ),
}


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
    optimizer steps on it, if no optimizer steps any more because of it, or if the program raises or
    exits before the backward: then the loss is found in the variables of the functions that it
    leaves.

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
        **{rule: origin.when for rule, origin in ORIGINS.items()},
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
        Effect(
            ("first-failure",),
            when=(
                Condition(
                    "of ranks that stopped because of it",
                    lambda mine, other: (
                        bool(other.ranks) and {*other.ranks} <= {*_stopped_on(mine)}
                    ),
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
        rule, exploded = _origin(event), _exploded(event, rank)
        origin, facts = ORIGINS[rule], _facts(event, rank, guilty, run)
        last = max((r.steps for r in run.training_ranks()), default=step + 1) - 1
        stopped = [r.rank for r, e in guilty.items() if e.stopped]
        steps = Steps(step, max(step, last), max(step, last) - step + 1)
        if event.spared:
            steps = Steps(step, event.last, event.spared)
        yield self.finding(
            rule=EXPLODED if exploded else rule,
            ranks=tuple(r.rank for r in guilty),
            steps=steps,
            subjects=event.names,
            location=spot,
            label=origin.label.format_map(facts),
            related=_related(rank, event, spot),
            summary=origin.summary.format_map(facts),
            cause=(exploded or origin.cause.format_map(facts)) + _no_more_steps(event),
            fix=f"{_LOWER_RATE}look for what makes the loss so large"
            if exploded
            else _safer(rule, event, rank) or origin.fix.format_map(facts),
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
                **({STOPPED_ON: stopped} if stopped else {}),
                **({"largest parameter": event.largest} if exploded else {}),
            },
            at=rank.wall(event.at),
        )


def _stopped_on(finding: Finding) -> list[int]:
    ranks = finding.evidence.get(STOPPED_ON)
    return ranks if isinstance(ranks, list) else []


def _first(rank: Rank) -> NonFinite | None:
    """The first non-finite value of a rank that mattered: a step was taken on it, no step was taken
    any more, or the program failed. One that left the gradients finite counts only if there is no
    other."""
    failed = rank.exception is not None
    mattered = [e for e in rank.of(NonFinite) if e.applied or e.skipped or e.stopped or failed]
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


def _facts(
    event: NonFinite, rank: Rank, guilty: dict[Rank, NonFinite], run: Run
) -> dict[str, object]:
    """What the words of `ORIGINS` are completed with; empty where it is not known."""
    shown = event.names[:2]
    more = event.count - len(shown)  # a record holds the first names only
    names = listed([*shown, f"{more} more"] if more > 0 else shown)
    rows = f"{plural(len(event.rows), 'row')} {listed(event.rows)}"
    if len(event.rows) == ROWS_RECORDED:
        rows = f"rows {', '.join(map(str, event.rows))} and perhaps more"
    after = f" after `{event.module}`" if event.operation and event.module else ""
    if event.operation and event.within:
        after = f" in `{event.within}`"
    # Of the inputs only those of a wrapper are seen.
    wrapped = bool(rank.of(Wrapped))
    known = (
        ["inputs"] * wrapped + ["parameters"] + ["the model's output"] * (event.beyond == "finite")
    )
    return {
        "after": after,
        "before": event.step - 1,
        "came": "" if wrapped else "came with the inputs or ",
        "entered": event.entered,
        "finite": f"{listed(known)} were finite",
        "got": event.entered or event.operation,
        "inputs": f"{listed(event.names)} {plural(len(event.names), 'was', 'were')}",
        "into": event.module or event.entered,
        "kind": event.kind,
        "made": f", made in `{event.within}`," if event.within else "",
        "names": f" ({names})" if names else "",
        "of": f" of {event.operation}" if event.operation else "",
        "of_module": f" of {event.module}" if event.module else "",
        "operation": event.operation,
        "place": "here" if event.origin_site >= 0 else "before this line",
        "ranks": whom((r.rank for r in guilty), len(run.training_ranks())),
        "rows": f", in {rows} of the batch" if event.rows else "",
        "step": event.step,
        "towards": f", from {event.names[0]} towards the input" if event.names else "",
        "value": _value(event),
        "which": f"that of `{event.operation}`" if event.operation else "one",
        "wrong": "; its derivative there is finite, so the gradients are finite but wrong"
        if event.spared
        else "",
    }


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
    "ctc_loss": "a target is longer than its input allows (labels and their repetitions): leave "
    "out such samples, or pass `zero_infinity=True`",
}
"""By operation, how to keep it defined, and its derivative finite."""


def _safer(rule: str, event: NonFinite, rank: Rank) -> str:
    """What to do about this operation or these gradients; empty where the rule's own advice is
    better."""
    if rule == EARLIER_GRADIENT:
        return _fix_of_gradients(rank)
    if rule == DERIVATIVE:
        return _SAFE_DERIVATIVES.get(event.operation, "")
    return _SAFE_OPERATIONS.get(event.operation, "") if event.kind == "loss" else ""


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
