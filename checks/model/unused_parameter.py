"""DDP301."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from ddpdoctor.analysis.models import parameter_use as graphs
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrapped_models import Part
from ddpdoctor.events import UnusedParameters, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Rank, Run, some, title_of


class UnusedParameter(Check):
    """Parameters take no part in the loss

    ## What it finds
    Parameters that DistributedDataParallel was told to synchronise but that got no gradient in a
    backward that should have synchronised them: a layer that is defined and not used, an output
    that does not reach the loss, a branch that is not taken.

    ## How it knows
    In the first eight synchronising backwards of a model, and then in one of 8 (after 128 of them
    in one of 16; in a large model in one of half as many as it has parameters), hooks on all
    parameters show which of them get a gradient, before the optimizer steps. Others are looked at
    where they average nothing at all; and where torch refuses the next forward, its own list is
    taken. Which modules are called is noted in the first three forwards, and again when the set
    changes. The finding is proven.

    ## Why it hurts
    DDP waits for every parameter's gradient. Where one never comes, the gradients that share its
    bucket are not averaged either: the optimizer applies each rank's own gradients, the models
    drift apart, and torch raises only at the next forward - or never, if that was the last step.

    ## How to fix it
    Use the layer, remove it, or freeze it with `requires_grad_(False)` *before* the wrap. Where the
    set changes from step to step by design, wrap with `find_unused_parameters=True`.

    ## When it stays quiet
    Frozen parameters; parameters that DDP was told to ignore; micro-batches under `no_sync`; a
    model whose backward is still to come; several backwards over one forward that bring all
    gradients together, each parameter's in one of them; parameters that some ranks use and others
    do not (`rank-dependent-graph`). With `find_unused_parameters=True`, or a static graph, the run
    is right and this is a note with the names.
    """

    code = "DDP301"
    name = "unused-parameter"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if models.numbers(run) else models.NO_DDP

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            yield from self._judge(run, model)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if mine.severity is not Severity.ERROR:
            return False
        if other.check == "first-failure":
            said = str(other.evidence)  # torch's words, or Lightning's for them
            return "finished reduction" in said or "not used in producing the loss" in said
        # The gradients in the bucket of an unused parameter are never averaged.
        return other.check in ("gradient-drift", "parameter-drift", "unsynced-step")

    def _judge(self, run: Run, model: int) -> Iterator[Finding]:
        seen = {
            r: e for r in run.ranks.values() if (e := graphs.first_unused(r, model)) is not None
        }
        if not seen or graphs.differing(run, model) is not None:
            return
        rank, event = min(seen.items(), key=lambda item: (item[1].backward, item[0].rank))
        wrapped = models.wrap_of(rank, model)
        if wrapped is None:
            return
        allowed = event.find_unused or event.static_graph
        # Others in their stead, later: torch raises before that where it is not told to expect it.
        later = _later(rank, model, event) if allowed else []
        names = models.names_of(wrapped, [i for e in (event, *later) for i in e.indices])
        parts = models.parts_of(wrapped, event.indices)
        when = _when(rank, model, event, bool(later))
        share = _share(rank, model, event)
        reasons = {p: _why(event, p, share) for p in parts}
        why = reasons[parts[0]]
        yield self.finding(
            severity=Severity.NOTE if allowed else Severity.ERROR,
            ranks=tuple(r.rank for r in seen),
            steps=graphs.steps_seen(
                ((r, () if later else e.indices) for r, e in seen.items()), model
            ),
            subjects=names,
            location=models.made_at(rank, wrapped, parts[0]),
            label=why,
            related=_related(rank, wrapped, event, parts[0]),
            summary=f"{some(names)} of {title_of(rank, wrapped)} got no gradient "
            + (f"in some steps, {len(event.indices)} of them " if later else "")
            + f"{when} {models.on_ranks(run, (r.rank for r in seen))}",
            cause=_cause(reasons, allowed),
            fix=_fix(
                parts,
                why,
                allowed,
                _called(event, parts[0]),
                _freeze(rank, wrapped, parts),
                models.names_in_code(rank, wrapped)[0],
            ),
            fix_kind=FixKind.CHECK,
            evidence={
                "modules": [
                    {
                        "module": p.module or "(root)",
                        "class": p.kind,
                        "called": _called_so_far(rank, e, p),
                    }
                    for e in (event, *later)
                    for p in models.parts_of(wrapped, e.indices)
                ],
                "unused": f"{len(names)} of {len(wrapped.parameters)} parameters",
                "backward": event.backward,
                **graphs.seen_by(rank, model, event),
                "unused in": share + f" ({names[0]})" * bool(later),
                "find_unused_parameters": event.find_unused,
            },
            at=rank.wall(event.at),
        )


def _later(rank: Rank, model: int, event: UnusedParameters) -> list[UnusedParameters]:
    """Records that tell of more than this one and those before, and of that only."""
    found, reported = [], set(event.indices)
    for other in models.sets_of(rank, model):
        if more := tuple(i for i in other.indices if i not in reported):
            found.append(msgspec.structs.replace(other, indices=more))
            reported.update(more)
    return found


NEVER = "never called"
FROZEN = "frozen after the wrap"
OUTPUT = "called, but its output does not reach the loss"
BLIND = "called under no_grad only"
BESIDE = "takes no part in the loss, though the rest of its module does"
PLAIN = "gets no gradient"
SOMETIMES = "used in some steps only"
LEFT_OUT = "called, but its output is left out of the loss in some steps"


def _called(event: UnusedParameters, part: Part) -> str:
    if event.called is None:
        return "yes" if set(part.positions) <= set(event.unspent) else "not observed"
    inside = {c for c in event.called if c == part.module or c.startswith(f"{part.module}.")}
    if not inside:
        return "no"
    return "under no_grad" if inside <= set(event.blind) else "yes"


def _called_so_far(rank: Rank, event: UnusedParameters, part: Part) -> str:
    """As in that backward; not "no" where others brought its gradients."""
    called, use = _called(event, part), models.use_of(rank, event.model)
    left_out = max((use.unused.get(i, 0) for i in part.positions), default=0) if use else 0
    return "in some steps" if called == "no" and use and left_out < use.examined else called


def _share(rank: Rank, model: int, event: UnusedParameters) -> str:
    """`4 of 20 backwards`, for the parameter that was unused first."""
    use = models.use_of(rank, model)
    if use is None:
        return "1 of 1 backwards"
    return f"{use.unused.get(event.indices[0], 1)} of {use.examined} backwards examined"


def _when(rank: Rank, model: int, event: UnusedParameters, others: bool) -> str:
    """Of one step, where it is not known to be so in all."""
    use = models.use_of(rank, model)
    always = use is not None and all(use.unused.get(i) == use.examined for i in event.indices)
    if use is None or use.examined < 2 or others or not always:
        return f"at step {event.step}"
    return f"in any of {use.examined} backwards examined"


def _why(event: UnusedParameters, part: Part, share: str) -> str:
    words = share.split()
    if set(part.positions) <= set(event.frozen):
        return FROZEN
    if words[0] != words[2]:
        return LEFT_OUT if set(part.positions) <= set(event.unspent) else SOMETIMES
    called = _called(event, part)
    if called == "no":
        return NEVER
    if not part.whole or not part.module:
        return BESIDE
    return {"yes": OUTPUT, "under no_grad": BLIND}.get(called, PLAIN)


def _related(
    rank: Rank, wrapped: Wrapped, event: UnusedParameters, part: Part
) -> tuple[Related, ...]:
    places = [(wrapped.here, wrapped.site), ("backward without it", event.site)]
    branch = models.branch_of(event, part)
    if branch >= 0 and _called(event, part) not in ("yes", "under no_grad"):
        places.insert(0, ("it is left out here", branch))
    return models.related(rank, places)


def _cause(reasons: dict[Part, str], allowed: bool) -> str:
    alike = {why: [p for p in reasons if reasons[p] == why] for why in reasons.values()}
    text = "; ".join(_of_parts(parts, why) for why, parts in alike.items())
    if allowed:
        return f"{text}; DDP was told to expect that, so training is right"
    whose = "them" if len(reasons) > 1 else "it"
    return f"{text}; gradients that share a bucket with {whose} are applied without being averaged"


def _of_parts(parts: list[Part], why: str) -> str:
    """Why the first gets no gradient, and that it is the same with others."""
    part, *others = parts
    more = f", and so it is with {some(p.title for p in others)}" if others else ""
    return {
        NEVER: f"{part.title} was never called in the forward",
        OUTPUT: f"{part.title} was called, but no gradient comes back through what it returned: "
        "that does not reach the loss, or only detached",
        BLIND: f"{part.title} was called under `no_grad` only, so that no gradient can reach it",
        SOMETIMES: f"{part.title} takes part in some steps and not in others",
        LEFT_OUT: f"{part.title} was called, and the forward made something of what it returned, "
        "but in these steps the loss does not depend on that; in others it does",
        FROZEN: f"{part.title} was frozen after the wrap, and DDP still waits for its gradients",
        BESIDE: f"the loss does not depend on a parameter of {part.title}: the forward does not "
        "use it, or what it adds drops out (as a bias does of a loss of derivatives)",
        PLAIN: f"{part.title} took no part in the loss",
    }[why] + more


def _freeze(rank: Rank, wrapped: Wrapped, parts: list[Part]) -> str:
    """Code that freezes them."""
    inner = models.names_in_code(rank, wrapped)[1]
    return some(dict.fromkeys(_freezing(wrapped, p, inner) for p in parts), 3)


def _freezing(wrapped: Wrapped, part: Part, inner: str) -> str:
    """The module where all of it is unused, else the parameter."""
    names = models.names_of(wrapped, part.positions)
    if part.whole and part.module:
        return f"`{part.code(inner)}.requires_grad_(False)`"
    if len(names) > 1:
        return "`parameter.requires_grad_(False)`"
    return f"`{replace(part, module=names[0]).code(inner)}.requires_grad_(False)`"


def _fix(parts: list[Part], why: str, allowed: bool, called: str, freeze: str, wrapper: str) -> str:
    if allowed and why not in (SOMETIMES, LEFT_OUT):
        return f"if it is never used, remove it or freeze it before the wrap: {freeze}"
    if allowed:
        return "nothing to change; `find_unused_parameters=True` is needed for this model"
    if why == LEFT_OUT or (why == SOMETIMES and called == "yes"):
        first = parts[0].code(f"{wrapper}.module")
        others = f" (and so {some(p.title for p in parts[1:])})" if parts[1:] else ""
        return (
            "let it take part with weight zero in the steps that leave it out: `loss + 0.0 * "
            f"sum(p.sum() for p in {first}.parameters())`{others}; "
            "`find_unused_parameters=True` does not help where the wrapper's output depends on it"
        )
    return {
        NEVER: f"call it, remove it, or freeze it before the wrap: {freeze}; if it is used in some "
        "steps only: `DDP(..., find_unused_parameters=True)`",
        OUTPUT: "let its output take part in the loss, or remove it; to keep it unused, freeze it "
        f"before the wrap: {freeze}",
        BLIND: f"what is not to be trained is frozen before the wrap: {freeze}; if it is to be "
        "trained, call it outside of `no_grad`",
        SOMETIMES: "`DDP(..., find_unused_parameters=True)`, or let it take part with weight "
        "zero in the steps that skip it: `loss + 0.0 * sum(p.sum() for p in part.parameters())`",
        FROZEN: f"freeze it before the wrap ({freeze}), or wrap again after freezing",
        BESIDE: "use the parameter in `forward`, remove it (`bias=False`), or freeze it before the "
        "wrap",
        PLAIN: f"use it, remove it, or freeze it before the wrap: {freeze}",
    }[why]
