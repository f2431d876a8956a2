"""DDP301."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import msgspec

from ddpdoctor.analysis.models import parameter_use as graphs
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_options import WrapOptions
from ddpdoctor.analysis.models.wrapped_models import Part, Reason
from ddpdoctor.events import (
    CallSite,
    Edited,
    GatheredWhole,
    OptimizerSeen,
    UnusedParameters,
    Wrapped,
)
from ddpdoctor.events.model import ALWAYS_EXAMINED
from ddpdoctor.report.declarations import NOT_AVERAGED, Effect, When
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, Related, Severity
from ddpdoctor.run import Location, Rank, Run, plural, some, title_of


class Called(enum.Enum):
    """Whether forwards called a module; the value is the word in the evidence."""

    YES = "yes"
    NO = "no"
    NO_GRAD = "with gradients off"
    SOMETIMES = "in some steps"
    UNKNOWN = "not observed"


REASONS = {
    "never-called": Reason(
        "the forward never called the module",
        "never called",
        "no forward that was examined called {part}{more}",
        "call it, remove it, or freeze it before the wrap: {freeze}; if it is used in some steps "
        "only: {ddp.unused}",
    ),
    "frozen-after-wrap": Reason(
        "the parameters were frozen after the wrap",
        "frozen after the wrap",
        "{part} was frozen after the wrap{more}, and DDP still waits for its gradients",
        "wrap again after freezing, or freeze it before the wrap if it is never trained: {freeze}; "
        "if other steps are to train it: {ddp.unused}",
    ),
    "frozen-in-some-steps": Reason(
        "the parameters were frozen in that backward, and thawed later",
        "frozen in this backward, thawed later",
        "{part} was frozen in this backward (`requires_grad` was False) and thawed later, so it is "
        "to be trained in others{more}, and DDP waits for its gradients in each",
        "{ddp.unused}{apart}",
    ),
    "output-not-in-loss": Reason(
        "the module was called, but the loss does not use its output",
        "called, but no gradient comes back",
        "{part} was called{more}, but no gradient comes back through its output: the loss does not "
        "use it, or gradients end on the way (`detach()`, a collective)",
        "use its output in the loss, or remove it; to keep it unused, freeze it before the wrap: "
        "{freeze}",
    ),
    "called-under-no-grad": Reason(
        "the module was called only while gradients were off",
        "called only while gradients were off",
        "{part} was called only while gradients were off (`no_grad`, or re-entrant checkpointing "
        "none of whose inputs requires a gradient){more}, so no gradient can reach it",
        "if it should not be trained, freeze it before the wrap: {freeze}; if it should, call it "
        "with gradients on",
    ),
    "one-parameter": Reason(
        "the loss does not depend on a parameter whose module it uses",
        "not used in the loss, unlike the rest of its module",
        "the loss does not depend on a parameter of {part}{more}: the forward does not use it, or "
        "its contribution cancels out (a bias, in a loss of derivatives)",
        "use the parameter in `forward`, remove it (`bias=False`), or freeze it before the wrap",
    ),
    "not-in-loss": Reason(
        "nothing is known but that the parameters get no gradient",
        "gets no gradient",
        "{part} was not used in the loss{more}",
        "use it, remove it, or freeze it before the wrap: {freeze}",
    ),
    "used-in-some-steps": Reason(
        "the parameters get a gradient in other steps",
        "used in some steps only",
        "{part} is used in some steps and not in others{more}",
        "{ddp.unused}, or use it with weight zero in the steps that "
        "skip it: `loss + 0.0 * sum(p.sum() for p in part.parameters())`",
    ),
    "parameter-in-some-steps": Reason(
        "the loss of some steps depends on other parameters of a module, and not on these",
        "has no gradient in this backward, unlike the rest of its module",
        "the loss of these steps depends on other parameters of {part}{more}, and not on this one: "
        "a penalty on derivatives does not depend on the biases after the last activation",
        "use it with weight zero in these steps: add `0.0 * output.sum()` to the loss",
    ),
    "output-in-some-steps": Reason(
        "the module was called, and the loss uses its output in other steps",
        "called, but its output is not used in the loss in some steps",
        "{part} was called and the forward used its output{more}, but in these steps the loss does "
        "not depend on it; in others it does",
    ),
}

SOME_STEPS = (
    "used-in-some-steps",
    "output-in-some-steps",
    "parameter-in-some-steps",
    "frozen-in-some-steps",
)
"""Rules for parameters that get a gradient in other steps."""

APART = ", or wrap each part that has an optimizer of its own by itself"


ENDS = {
    "output-not-in-loss": "let its gradient reach the loss: it ends in `detach()`, `.data`, "
    "`.item()`, `no_grad`, a cast to integers, and in collectives (`dist.all_gather`; "
    "`torch.distributed.nn.functional.all_gather` passes it on); if the module is not to be "
    "trained, freeze it before the wrap",
    "called-under-no-grad": "call it outside of `no_grad`; under re-entrant checkpointing, let an "
    "input of the checkpoint require a gradient (`x.requires_grad_()`), or pass "
    "`use_reentrant=False`; if the module is not to be trained, freeze it before the wrap",
}
"""Rules for modules that are called but get no gradient: what to do if they are to be trained."""

NEVER_LEARNS = "never-learns"
"""The rule for these where DDP allows unused parameters, and the optimizer is to train them."""

ENDS_HERE = "no gradient passes through this call, unless an autograd.Function wraps it"
COLLECTIVE = re.compile(
    r"\b(?:dist|distributed)\.(?:all_gather|all_reduce|broadcast|all_to_all|reduce_scatter)\w*\("
)


class UnusedParameter(Check):
    """Parameters are not used in the loss

    ## What it finds
    Parameters that DistributedDataParallel synchronises but that got no gradient in a synchronised
    backward: a layer that is defined but not used, an output that is not used in the loss, a branch
    that is not taken.

    ## How it knows
    In the first eight synchronising backwards of a model, and then in every 8th (every 16th after
    128; in a large model, one in half as many as it has parameters), hooks on all parameters show
    which of them get a gradient, before the optimizer steps. Other backwards are examined if they
    average nothing at all; if torch rejects the next forward, its own list is used. The called
    modules are recorded in the first three forwards, and again when the set changes. The finding is
    proven.

    ## Why it hurts
    DDP waits for every parameter's gradient. If one never comes, the gradients in the same bucket
    are not averaged either: the optimizer applies each rank's own gradients, the replicas diverge,
    and torch raises only in the next forward, or never if that was the last step.

    ## How to fix it
    Use the layer, remove it, or freeze it with `requires_grad_(False)` *before* the wrap. If the
    set changes from step to step by design, or parameters are frozen for some steps only (a GAN
    that trains one half at a time), wrap with `find_unused_parameters=True`.

    ## When it stays quiet
    - Frozen parameters, and those that DDP ignores (`_ddp_params_and_buffers_to_ignore`).
    - Micro-batches under `no_sync`, and models without a backward so far.
    - Several backwards over one forward that together compute all gradients, each parameter's in
      one of them.
    - Parameters that only some ranks use (see `rank-dependent-graph`).

    Only a note, with `find_unused_parameters=True` or a static graph: DDP allows that. It stays an
    error if every forward calls the module, at least eight backwards were examined, none on any
    rank had a gradient for it, and the optimizer holds its parameters: then it never learns. A
    module that no optimizer holds, or whose parameters the program writes by itself (a moving
    average), is not meant to.
    """

    code = "DDP301"
    name = "unused-parameter"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        **models.rules(REASONS),
        NEVER_LEARNS: "the optimizer holds the parameters of a module that is called, but no "
        "gradient ever comes; the options of DDP hide that",
    }
    requires = (models.needs_ddp,)
    effects = (
        Effect(("first-failure",), errors=(ErrorKind.REDUCTION_UNFINISHED,), when=(When.IS_ERROR,)),
        # The gradients in the bucket of an unused parameter are never averaged.
        Effect(NOT_AVERAGED, of=tuple(REASONS), when=(When.IS_ERROR,)),
        # What made the gathered tensor gets no gradient.
        Effect(("loss-scale-mismatch",), rules=("gathered-without-gradient",)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for model in models.numbers(run):
            yield from self._judge(run, model)

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
        # Later, others may be unused instead: without these options, torch raises before that.
        later = _later(rank, model, event) if allowed else []
        names = models.names_of(wrapped, [i for e in (event, *later) for i in e.indices])
        parts = models.parts_of(wrapped, event.indices)
        when = _when(rank, model, event, bool(later))
        left_out, examined = _share(rank, model, event)
        share = f"{left_out} of {examined} backwards examined"
        thawed = {i for r in run.ranks.values() for i in models.thawed(r, model)}
        rules = {p: _rule(event, p, thawed, always=left_out == examined) for p in parts}
        lost = [p for p in parts if allowed and _is_lost(run, model, p, rules[p])]
        parts.sort(key=lambda p: p not in lost)  # the module at fault leads
        rules = {p: rules[p] for p in parts}
        rule = rules[parts[0]]
        where = _place(rank, wrapped, event, parts[0], rule)
        ends = rule == "output-not-in-loss"
        sites = _collectives(rank) if lost else _gathered(rank, event, wrapped)
        gathered = _ending(rank, sites) if ends else ()
        yield self.finding(
            rule=NEVER_LEARNS if lost else rule,
            severity=Severity.NOTE if allowed and not lost else Severity.ERROR,
            ranks=tuple(r.rank for r in seen),
            steps=graphs.steps_seen(
                ((r, () if later else e.indices) for r, e in seen.items()), model
            ),
            subjects=names,
            location=where,
            label=REASONS[rule].label,
            related=(
                *gathered,
                *(r for r in _related(rank, wrapped, event, parts[0]) if r.location != where),
            ),
            summary=f"{some(names)} of {title_of(rank, wrapped)} "
            f"{plural(len(names), 'gets', 'get')} no gradient "
            + (f"in some steps, {len(event.indices)} of them " if later else "")
            + f"{when} {models.on_ranks(run, (r.rank for r in seen))}",
            cause=_cause(rules, allowed, lost),
            fix=ENDS[rule]
            if lost or gathered
            else _fix(
                parts,
                rule,
                allowed,
                _called(event, parts[0]),
                _freeze(rank, wrapped, parts),
                models.names_in_code(rank, wrapped)[0],
                WrapOptions(wrapped),
            ),
            evidence={
                "modules": [
                    {
                        "module": p.module or "(root)",
                        "class": p.kind,
                        "called": _called_so_far(rank, e, p).value,
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
    """Later records with parameters that neither this one nor one before has, reduced to these."""
    found, reported = [], set(event.indices)
    for other in models.sets_of(rank, model):
        if more := tuple(i for i in other.indices if i not in reported):
            found.append(msgspec.structs.replace(other, indices=more))
            reported.update(more)
    return found


def _called(event: UnusedParameters, part: Part) -> Called:
    """Whether the forward of that backward called the module."""
    if event.called is None:
        unspent = set(part.positions) <= set(event.unspent)
        return Called.YES if unspent else Called.UNKNOWN
    inside = {c for c in event.called if c == part.module or c.startswith(f"{part.module}.")}
    if not inside:
        return Called.NO
    return Called.NO_GRAD if inside <= set(event.blind) else Called.YES


def _called_so_far(rank: Rank, event: UnusedParameters, part: Part) -> Called:
    """Whether forwards until then called the module: also if other backwards had its gradients."""
    called, use = _called(event, part), models.use_of(rank, event.model)
    left_out = max((use.unused.get(i, 0) for i in part.positions), default=0) if use else 0
    sometimes = called is Called.NO and use and left_out < use.examined
    return Called.SOMETIMES if sometimes else called


def _share(rank: Rank, model: int, event: UnusedParameters) -> tuple[int, int]:
    """In how many backwards the first unused parameter got no gradient, and of how many."""
    use = models.use_of(rank, model)
    return (1, 1) if use is None else (use.unused.get(event.indices[0], 1), use.examined)


def _when(rank: Rank, model: int, event: UnusedParameters, others: bool) -> str:
    """The step, unless the same parameters were unused in all examined backwards."""
    use = models.use_of(rank, model)
    always = use is not None and all(use.unused.get(i) == use.examined for i in event.indices)
    if use is None or use.examined < 2 or others or not always:
        return f"at step {event.step}"
    return f"in all {use.examined} backwards examined"


def _rule(event: UnusedParameters, part: Part, thawed: set[int], *, always: bool) -> str:
    """Why a part has no gradient. What was done to it comes before what the forward did with it."""
    positions = set(part.positions)
    unspent = positions <= set(event.unspent)
    if positions <= set(event.frozen):
        return "frozen-in-some-steps" if positions <= thawed else "frozen-after-wrap"
    if not always and not part.whole and part.module and _called(event, part) is Called.YES:
        return "parameter-in-some-steps"
    if not always:
        return "output-in-some-steps" if unspent else "used-in-some-steps"
    called = _called(event, part)
    if called is Called.NO:
        return "never-called"
    if not part.whole or not part.module:
        return "one-parameter"
    rules = {Called.YES: "output-not-in-loss", Called.NO_GRAD: "called-under-no-grad"}
    return rules.get(called, "not-in-loss")


def _place(
    rank: Rank, wrapped: Wrapped, event: UnusedParameters, part: Part, rule: str
) -> Location | None:
    """The line that makes the module; of a single parameter that one loss leaves out, the line of
    the backward; of one that is frozen for a while, the line that freezes it."""
    sites = {"parameter-in-some-steps": event.site, "frozen-in-some-steps": event.frozen_site}
    return rank.location(sites.get(rule, -1)) or models.made_at(rank, wrapped, part)


def _related(
    rank: Rank, wrapped: Wrapped, event: UnusedParameters, part: Part
) -> tuple[Related, ...]:
    places = [(wrapped.here, wrapped.site), ("backward without it", event.site)]
    if set(part.positions) <= set(event.frozen):
        places.insert(0, ("frozen here", event.frozen_site))
    branch = models.branch_of(event, part)
    if branch >= 0 and _called(event, part) not in (Called.YES, Called.NO_GRAD):
        places.insert(0, ("skipped here", branch))
    return models.related(rank, places)


def _is_lost(run: Run, model: int, part: Part, rule: str) -> bool:
    """Whether all ranks call a module and the optimizer is to train it, but no gradient ever comes.

    Modules that no optimizer holds, and those whose parameters the program writes by itself (a
    moving average), are not meant to get gradients.
    """
    if rule not in ENDS:
        return False
    for rank in run.ranks.values():
        use, wrapped = models.use_of(rank, model), models.wrap_of(rank, model)
        if use is None or wrapped is None or use.examined < ALWAYS_EXAMINED:
            return False
        if any(use.unused.get(i) != use.examined for i in part.positions):
            return False
        trained = sum(p.trainable and not p.ignored for p in wrapped.parameters)
        held = [e.parameters - e.foreign for e in rank.of(OptimizerSeen) if model in e.models]
        if sum(held) < trained:
            return False
        if any(e.model == model and e.kind == "parameters" for e in rank.of(Edited)):
            return False
    return True


def _collectives(rank: Rank) -> Iterator[CallSite]:
    """The lines in a forward that call a collective, through which no gradient passes."""
    for site in rank.of(CallSite):
        if any((at := rank.location(p.site)) and at.function == "forward" for p in site.places):
            spot = rank.location(site.line)
            if spot and COLLECTIVE.search(spot.source):
                yield site


def _gathered(rank: Rank, event: UnusedParameters, wrapped: Wrapped) -> Iterator[CallSite]:
    """The lines that gathered tensors before a backward that reached less than half of a model."""
    if 2 * len(event.indices) > len(wrapped.parameters):
        before = {e.call_site for e in rank.of(GatheredWhole) if e.at < event.at}
        yield from (site for site in rank.of(CallSite) if site.id in before)


def _ending(rank: Rank, sites: Iterable[CallSite]) -> tuple[Related, ...]:
    spots = dict.fromkeys(spot for site in sites if (spot := rank.location(site.line)))
    return tuple(Related(ENDS_HERE, spot) for spot in list(spots)[:2])


def _cause(rules: dict[Part, str], allowed: bool, lost: list[Part]) -> str:
    by_rule = {rule: [p for p in rules if rules[p] == rule] for rule in rules.values()}
    text = "; ".join(_of_parts(parts, rule) for rule, parts in by_rule.items())
    if lost:
        return (
            f"{text}. The optimizer holds {'them' if len(lost) > 1 else 'it'}, but never gets a "
            "gradient to apply; the options of DDP only keep torch from raising"
        )
    if allowed:
        return f"{text}. The options of DDP allow that"
    whose = "them" if len(rules) > 1 else "it"
    return f"{text}. Gradients in the same bucket as {whose} are applied without being averaged"


def _of_parts(parts: list[Part], rule: str) -> str:
    """Why the first of these modules gets no gradient, and that the others have the same reason."""
    part, *others = parts
    more = f" (also {some(p.title for p in others)})" if others else ""
    return REASONS[rule].cause.format(part=part.title, more=more)


def _freeze(rank: Rank, wrapped: Wrapped, parts: list[Part]) -> str:
    """Code that freezes the parts."""
    inner = models.names_in_code(rank, wrapped)[1]
    return some(dict.fromkeys(_freezing(wrapped, p, inner) for p in parts), 3)


def _freezing(wrapped: Wrapped, part: Part, inner: str) -> str:
    """Code that freezes a module if all of it is unused, else the parameter."""
    names = models.names_of(wrapped, part.positions)
    if part.whole and part.module:
        return f"`{part.code(inner)}.requires_grad_(False)`"
    if len(names) > 1:
        return "`parameter.requires_grad_(False)`"
    return f"`{replace(part, module=names[0]).code(inner)}.requires_grad_(False)`"


def _fix(
    parts: list[Part],
    rule: str,
    allowed: bool,
    called: Called,
    freeze: str,
    wrapper: str,
    ddp: WrapOptions,
) -> str:
    if allowed and rule not in SOME_STEPS:
        return f"if it is never used, remove it or freeze it before the wrap: {freeze}"
    if allowed:
        return "nothing: this model needs `find_unused_parameters=True`"
    if rule == "output-in-some-steps" or (rule == "used-in-some-steps" and called is Called.YES):
        first = parts[0].code(f"{wrapper}.module")
        others = f" (also {some(p.title for p in parts[1:])})" if parts[1:] else ""
        return (
            "use it with weight zero in the steps that leave it out: `loss + 0.0 * "
            f"sum(p.sum() for p in {first}.parameters())`{others}; "
            "`find_unused_parameters=True` does not help if the wrapper's output depends on it"
        )
    apart = "" if ddp.wrapped.by else APART
    return REASONS[rule].fix.format(freeze=freeze, ddp=ddp, apart=apart)
