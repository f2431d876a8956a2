"""DDP801."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import NonFinite, ScalerStep, Sketch, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, ranks_text

_FURTHEST = (("input", "buffer"), ("parameter",), ("loss", "gradient"))
"""What comes before what in one step: a loss may have it from another rank, by what its forward
exchanges."""

_PASSING_ON = ("add", "sub", "mul", "sum", "mean", "cat", "stack", "masked_fill", "where")
"""Operations that rarely make what is not finite; the graph keeps little of what they are given."""

HUGE, GROWN = 1e6, 1e3
"""A parameter as large as that, and so many times the norm of all before, has exploded."""

EXPLODED = (
    "lower the learning rate, clip gradients (`clip_grad_norm_`), or look for what makes the loss "
    "so large"
)


class NonfiniteOrigin(Check):
    """NaN or infinity: where it came from

    ## What it finds
    The rank and the step at which the first NaN or infinity appeared, before averaging gave it to
    all: in the inputs of the wrapped forward, in the loss (and then the operation and the module
    that made it), or in a rank's own gradients while its loss was still finite. Also a NaN loss
    that leaves the gradients finite, as that of a logarithm of a negative number does.

    ## How it knows
    In every backward the loss is looked at, and in the first 128, later as `--budget` allows, some
    of this rank's own gradients before they are averaged (of some 30 parameters, later mostly of
    one). A loss that is not finite is followed back at once: to parameters, inputs and buffers of
    the forward, or along autograd's graph to an operation; it is told when an optimizer steps on
    it, or none does again and again. On a GPU nothing waits for the device: loss and one gradient
    are flagged there and read at a later step, which tells the rank and the step, not the
    operation. The finding is proven.

    ## Why it hurts
    One step later every rank has it in all parameters, the loss is NaN everywhere, and nothing
    tells any more that it was one bad sample on one rank.

    ## How to fix it
    Depends on where it came from: clean the sample that is named; keep the operation away from
    what it cannot do (`log(x.clamp_min(eps))`, `x / (norm + eps)`, `sqrt(x + eps)`); lower the
    learning rate or clip gradients where the parameters grew beyond all bounds; skip a step that
    is not finite on *all* ranks.

    ## When it stays quiet
    Steps that a GradScaler skips, and a loss that is not finite on which no optimizer steps: unless
    it is NaN, or parameters are not finite, in one backward after another. Infinities inside the
    model (masks) that do not reach the loss. The mean of nothing, whose gradients are finite.
    """

    code = "DDP801"
    name = "nonfinite-origin"
    family = "numerics"
    severity = Severity.ERROR

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
        kinds = next((k for k in _FURTHEST if any(e.kind in k for e in now.values())), ())
        guilty = {r: e for r, e in now.items() if e.kind in kinds} or now
        rank, event = min(guilty.items(), key=lambda item: item[1].kind == "gradient")
        spot, step = _spot(rank, event), event.step - _brought(event)
        exploded = _exploded(event, rank)
        last = max((r.steps for r in run.training_ranks()), default=step + 1) - 1
        steps = Steps(step, max(step, last), max(step, last) - step + 1)
        if event.spared:
            steps = Steps(step, event.last, event.spared)
        yield self.finding(
            ranks=tuple(r.rank for r in guilty),
            steps=steps,
            subjects=event.names,
            location=spot,
            label=_label(event),
            related=_related(rank, event, spot),
            summary=_summary(event, guilty, run),
            cause=(exploded or _cause(event, rank)) + _lasting(event),
            fix=EXPLODED if exploded else _advice(event, rank),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "first seen": [_row(r, e) for r, e in firsts.items()],
                "first not finite": event.kind,
                "operation": event.operation,
                "module": event.within or event.module,
                "rows of the batch": list(event.rows),
                "skipped in a row": event.skipped or "",
                "brought by a gradient of step": step if _brought(event) else "",
                "finite on": [
                    r.rank for r in run.training_ranks() if _brought(event) and r not in firsts
                ],
                **({"largest parameter": event.largest} if exploded else {}),
            },
            at=rank.wall(event.at),
        )

    def explains(self, mine: Finding, other: Finding) -> bool:
        drifts = ("gradient-drift", "parameter-drift", "buffer-drift", "optimizer-state-drift")
        began = mine.steps.first if mine.steps else 0
        later = other.steps is not None and other.steps.first >= began
        return other.check in drifts and later and "nan" in str(other.evidence).lower()


def _first(rank: Rank) -> NonFinite | None:
    """The first that mattered: a step was taken on it, none was ever again, or the program ended
    over it. What left the gradients finite only where nothing else did."""
    failed = rank.exception is not None
    mattered = [e for e in rank.of(NonFinite) if e.applied or e.skipped or failed]
    spared = [e for e in mattered if e.spared]
    return next((e for e in mattered if not e.spared), spared[-1] if spared else None)


def _when(event: NonFinite) -> int:
    return event.total if event.total >= 0 else event.step


def _brought(event: NonFinite) -> bool:
    """A gradient of the step before brought it, of which rank is not known."""
    return event.kind == "parameter" and event.gradients and event.step > 0


def _exploded(event: NonFinite, rank: Rank) -> str:
    """How far the parameters had grown, where that is beyond all bounds."""
    early: dict[tuple[int, int], Sketch] = {}
    for sketch in rank.of(Sketch):
        if sketch.kind == "parameters" and sketch.step < event.step:
            early.setdefault((sketch.model, sketch.optimizer), sketch)
    was = max(early.values(), key=lambda s: s.norm, default=None)
    if was is None or event.largest < max(HUGE, was.norm * GROWN):
        return ""
    return (
        f"the parameters exploded: one of them is {event.largest:.0e}, and the norm of all was "
        f"{was.norm:.2g} at step {was.step}; numbers made from them are beyond what the type can "
        "hold"
    )


def _lasting(event: NonFinite) -> str:
    if not event.skipped:
        return ""
    since = f"backward {event.backward}, counted from 0," if event.backward >= 0 else "then"
    return (
        f"; since {since} no step is taken ({event.skipped} in a row were seen): no loss scale can "
        "mend it"
    )


def _spot(rank: Rank, event: NonFinite) -> Location | None:
    for site in (event.origin_site, event.site, event.forward_site):
        if (found := rank.location(site)) is not None:
            return found
    return None


def _made(event: NonFinite) -> bool:
    return bool(event.operation) and event.operation not in _PASSING_ON


def _of(event: NonFinite) -> str:
    return f" of {event.operation}" if event.operation else ""


def _label(event: NonFinite) -> str:
    if event.kind == "input":
        return f"is given {event.value}"
    if event.derivative_site >= 0:
        return f"{event.value} in the derivative{_of(event)}"
    if event.kind == "loss":
        what = f"{event.operation} gives " if _made(event) else ""
        if event.beyond:
            here = event.origin_site >= 0
            return f"{event.entered} {'is' if here else 'was'} given {event.value}" + (
                "" if here else " before"
            )
        if event.entered:
            return f"{event.value} arises here, before {event.module or event.entered}"
        return f"{what}{event.value}"
    return f"{event.value} in a {event.kind}"


def _related(rank: Rank, event: NonFinite, spot: Location | None) -> tuple[Related, ...]:
    places = (
        ("the derivative is taken here", rank.location(event.derivative_site)),
        (
            "its backward" if event.spared else "the backward that spread it",
            rank.location(event.site),
        ),
    )
    return tuple(Related(what, at) for what, at in places if at is not None and at != spot)


def _summary(event: NonFinite, guilty: dict[Rank, NonFinite], run: Run) -> str:
    everyone = len(guilty) == len(run.training_ranks())
    ranks = "all ranks" if everyone and len(guilty) > 1 else (
        ranks_text(r.rank for r in guilty)
    )  # fmt: skip
    some = ", ".join(event.names[:2]) + (f" and {event.count - 2} more" if event.count > 2 else "")
    value = {"nan": "NaN", "inf": "infinity"}.get(event.value, "NaN or infinity")
    if event.kind == "input":
        return f"the first {value} comes with the input of {ranks} at step {event.step} ({some})"
    if event.kind == "gradient":
        where = f", from {event.names[0]} down" if event.names else ""
        return (
            f"the first {value} is in the gradients of {ranks} at step {event.step}{where}, while "
            "the loss is finite"
        )
    if _brought(event):
        return (
            f"the gradients applied at step {event.step - 1} were not finite, while the loss was: "
            f"parameters of {ranks} are so since then ({some})"
        )
    if event.kind in ("parameter", "buffer"):
        return f"{event.kind}s of {ranks} are not finite at step {event.step} ({some})"
    made = f": {event.operation} made it" if event.operation else ""
    if event.operation in _PASSING_ON:
        made = f": it came out of {event.operation}"
    if event.beyond:
        made = f": it came into {event.entered}, after the model's forward"
    elif event.entered:
        source = f" from {event.within}" if event.within else ""
        made = f": it came into {event.module or event.entered}{source}"
    if event.derivative_site >= 0:
        made = f": it arose in the derivative{_of(event)}"
    after = f" after {event.module}" if event.operation and event.module else ""
    if event.operation and event.within:
        after = f" in {event.within}"
    return f"the first {value} is in the loss of {ranks} at step {event.step}{made}{after}"


def _cause(event: NonFinite, rank: Rank) -> str:
    if event.kind == "input":
        row = "row" if len(event.rows) == 1 else "rows"
        rows = f", in {row} {', '.join(map(str, event.rows))} of the batch" if event.rows else ""
        return f"{', '.join(event.names)} held it before the forward{rows}"
    if event.kind == "loss" and event.beyond:
        finite = ", and so was what the model returned" if event.beyond == "finite" else ""
        return (
            f"{_finite(rank)}{finite}; after the forward `{event.entered}` was "
            "given what was not, in numbers that need no gradient"
        )
    if event.kind == "loss" and event.entered:
        into = f" of {event.module}" if event.module else ""
        return (
            f"{_finite(rank)}; what `{event.entered}`{into} was given was not: it "
            f"{'' if rank.of(Wrapped) else 'came with the inputs, or '}arose on the way there, in "
            "numbers that need no gradient"
        )
    if event.derivative_site >= 0:
        what = f"`{event.operation}` has no finite one" if event.operation else "one was not finite"
        return (
            "inputs, parameters and the forward were finite; of the derivatives that "
            f"`torch.autograd.grad` takes on the way to the loss {what} where it was used"
        )
    if event.kind == "loss" and not event.operation:
        return (
            "it arose on the way to the loss; by which operation the graph does not tell: what is "
            "sharded or checkpointed there is not unpacked"
        )
    if event.kind == "loss" and not _made(event):
        return (
            f"{_finite(rank)}; of what `{event.operation}` was given the graph "
            "does not tell: it may have come from before"
        )
    if event.kind == "loss":
        left = "; its derivative there is a number, so the gradients are finite, and wrong"
        return (
            f"{_finite(rank)}; `{event.operation}` was given values it cannot "
            f"take{left if event.spared else ''}"
        )
    if event.kind == "gradient":
        return (
            "an operation has no finite derivative where it was used (a square root or a norm of "
            "zero, a masked branch that is not finite, the backward of one's own "
            "`autograd.Function`); averaging then gave it to every rank"
        )
    if _brought(event):
        return (
            "the optimizer's state holds it too, so a gradient brought it; of which rank is not "
            "known, as not every step's gradients are looked at before they are averaged"
        )
    if event.step == 0:
        return "they were so before the first step: from their initialisation, or a checkpoint"
    return (
        "the step before made them so: a gradient that was not finite (not every step's are looked "
        "at), the optimizer itself, or numbers beyond what the type can hold"
    )


def _finite(rank: Rank) -> str:
    """What is known to have been so: inputs are seen where a wrapper is given them."""
    return "inputs and parameters were finite" if rank.of(Wrapped) else "the parameters were finite"


def _advice(event: NonFinite, rank: Rank) -> str:
    return _fix_of_gradients(rank) if _brought(event) else _fix(event)


def _fix_of_gradients(rank: Rank) -> str:
    skip = "let all ranks skip the step where a gradient is not finite"
    if rank.of(Wrapped):
        return f"run again with `--every 1` to learn the rank; {skip}"
    if rank.of(ScalerStep):
        return (
            "reduce the gradients before `scaler.unscale_(optimizer)` or `scaler.step(optimizer)`: "
            "what other ranks add later is not looked at, and is applied"
        )
    return f"look at each rank's gradients before they are reduced; {skip}"


_SMOOTH = {
    "sqrt": "`x.clamp_min(1e-12).sqrt()`: its derivative at 0 is infinite",
    "pow": "`x.clamp_min(1e-12) ** p`: its derivative at 0 is infinite",
    "acos": "`x.clamp(-1 + 1e-6, 1 - 1e-6).acos()`: its derivative at 1 and -1 is infinite",
    "asin": "`x.clamp(-1 + 1e-6, 1 - 1e-6).asin()`: its derivative at 1 and -1 is infinite",
}


def _fix(event: NonFinite) -> str:
    if event.kind == "input":
        return "clean the sample, or `x = torch.nan_to_num(x)` where that is what it means"
    if event.derivative_site >= 0:
        return _SMOOTH.get(event.operation, "") or (
            "look at what the derivative is taken of (`torch.autograd.detect_anomaly()` names the "
            "operation), and keep it away from where it has none that is finite"
        )
    if event.kind == "loss" and event.operation in ("log", "div", "sqrt", "pow"):
        return {
            "log": "`torch.log(x.clamp_min(1e-8))`",
            "div": "`a / b.clamp_min(1e-8)`, or `a / (b + eps)`",
            "sqrt": "`torch.sqrt(x.clamp_min(1e-8))`",
            "pow": "`x.clamp_min(1e-8) ** p`",
        }[event.operation]
    if event.kind == "loss" and event.operation in ("softmax", "log_softmax"):
        return (
            "a row that is masked throughout gives it: `x.masked_fill(mask, "
            "torch.finfo(x.dtype).min)` in place of `-inf`, or leave such rows out"
        )
    if event.kind == "loss" and (event.beyond or event.operation in _PASSING_ON):
        return (
            f"look at what `{event.entered or event.operation}` is given "
            "(`assert torch.isfinite(x).all()` on the way there), and let all ranks skip the step "
            "where one is not finite"
        )
    if event.kind in ("loss", "gradient"):
        return (
            "keep the operation away from such values (`x.clamp_min(eps)`), and let all ranks skip "
            "the step where one is not finite"
        )
    if event.step == 0:
        return (
            "initialise every parameter (after `to_empty()` each module needs its "
            "`reset_parameters()`), or check what was loaded"
        )
    return "lower the learning rate, clip gradients (`clip_grad_norm_`), or check what was loaded"


def _row(rank: Rank, event: NonFinite) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "step": event.step,
        "in": event.kind,
        "names": ", ".join(event.names[:3]),
    }
