"""The table of `model-not-wrapped`: a model without a wrapper whose gradients nothing synchronises,
the record of it, and what is said of each class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from ...events import OptimizerSeen, Unwrapped
from ...report.findings import Confidence, Evidence, Severity, Steps
from ...run import Location, ranks_do, ranks_text, whom
from . import other_exchanges
from .cases import Case, Rule
from .copies import Copies, same, step_of

AVERAGE = "`dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"


@dataclass(frozen=True)
class Alone(Case):
    """A model that ranks train without a wrapper.

    Attributes:
        world: how many ranks the run has.
        outside: the ranks that synchronise this model in a group of their own.
        groups: that hold copies each, beside model parallelism.
        exchanged: elements that these groups communicated since the first step, at most.
        doubt: in words, why the ranks may be meant to train different models.
    """

    world: int = 1
    outside: tuple[int, ...] = ()
    groups: tuple[Copies, ...] = ()
    exchanged: int = 0
    doubt: str = ""

    @property
    def event(self) -> Unwrapped:
        return self.copies.first[1]

    @property
    def steps(self) -> Steps:
        taken = max(r.steps_of(e.optimizer) for r, e in self.copies.members.values())
        return Steps(0, max(taken - 1, 0), max(taken, 1))

    @property
    def subjects(self) -> tuple[str, ...]:
        """Names of the parameters; one outside of modules may have a name in the program."""
        loose = self.event.name and not self.event.kind
        return (self.event.name,) if loose else super().subjects

    @property
    def optimizers(self) -> tuple[int, ...]:
        return tuple(sorted({e.optimizer for _, e in self.copies.members.values()}))

    @property
    def at(self) -> float:
        return self.copies.first[0].wall(self.event.at)

    def spot(self, name: str) -> Location | None:
        rank, event = self.copies.first
        if name == "made":
            return super().spot("made") or self.spot("optimizer")
        if name == "optimizer":
            seen = (o.site for o in rank.of(OptimizerSeen) if o.optimizer == event.optimizer)
            return rank.location(next(seen, -1))
        if name == "exchange":
            return rank.location(self.copies.close[-1][rank.rank].exchange_site)
        if name == "copied":
            states = (look[rank.rank] for look in self.copies.looks)
            return rank.location(next((s.copied_site for s in states if s.copied), -1))
        return super().spot(name)

    # Values for the texts.

    @property
    def kind(self) -> str:
        """The model's class, or words for parameters of no module."""
        count = len(self.event.parameters)
        loose = "a parameter outside of modules" if count == 1 else f"a set of {count} parameters"
        return self.event.kind or loose

    @property
    def title(self) -> str:
        """`net (Net)`, where its name is known."""
        return f"{self.event.name} ({self.kind})" if self.event.name else self.kind

    @property
    def where(self) -> str:
        return f"on {whom(self.ranks, self.world)}"

    @property
    def unwrapped(self) -> str:
        if self.event.sharded:
            return (
                f"{self.kind} has other parameters that FSDP shards, but these were not among them"
            )
        return f"{self.kind} is not wrapped in DDP{self.another}"

    @property
    def another(self) -> str:
        return " (another model is)" if self.event.wrapped else ""

    @property
    def wrap(self) -> str:
        """What to do about a model that was never wrapped."""
        event = self.event
        if event.wrapped and not event.kind and len(event.parameters) == 1:
            return (
                "make it a parameter of the wrapped module and use it in its forward, or average "
                f"its gradient before the step: {AVERAGE}"
            )
        if event.sharded:
            return (
                "add these parameters before FSDP shards the model (`fully_shard`): it then shards "
                "them, too, and averages their gradients"
            )
        made = self.spot("made")
        name = made.named(event.kind)[0] if made and event.kind else ""
        what = self.title if event.kind else "the module that uses them"
        wrap, own = f"wrap {what} in DistributedDataParallel", ""
        if name:
            wrap = f"`{name} = DistributedDataParallel({name})`"
            own = f"; what else it has (methods, attributes) is then at `{name}.module`"
        return f"{wrap} before the optimizer is built, and train through it{own}"

    @property
    def wrap_part(self) -> str:
        """What to do about a module of a model of which other parts are wrapped."""
        paths = [subject.split(".")[:-1] for subject in self.subjects]
        same_words = takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False))
        name = ".".join(words[0] for words in same_words)
        mixed = any(f"{other}.".startswith(f"{name}.") for other in self.example)
        wrap = "wrap the module that holds them in DistributedDataParallel"
        if name and self.event.name and not mixed and not any(map(str.isdigit, name.split("."))):
            part = f"{self.event.name}.{name}"
            wrap = f"`{part} = DistributedDataParallel({part})`"
        average = "its gradient" if self.few == 1 else "their gradients"
        return (
            f"{wrap} before the optimizer is built, or average {average} before the step: {AVERAGE}"
        )

    @property
    def besides(self) -> str:
        """What ranks that stay equal exchange otherwise, as a phrase; empty for nothing."""
        last = self.copies.looks[-1].values()
        ranks = [rank for rank, _ in self.copies.members.values()]
        return other_exchanges.reported(ranks, max(s.elements for s in last))

    @property
    def exchanged_nothing(self) -> str:
        return "none of its gradients are" if self.besides else "nothing is"

    @property
    def or_on_that(self) -> str:
        return f", or on {self.besides} that they exchange otherwise" if self.besides else ""

    @property
    def others_average(self) -> str:
        return ranks_do(self.outside, "average")

    @property
    def ranks_of_groups(self) -> str:
        return " and ".join(ranks_text(group.members) for group in self.groups)

    @property
    def all(self) -> int:
        """The model's parameters, those of other optimizers included."""
        return self.count if self.few < self.count else self.few + self.rest

    @property
    def owner(self) -> str:
        return self.event.kind or "an optimizer"


def _evidence(case: Alone) -> Evidence:
    rank, event = case.copies.first
    looks = case.copies.looks
    steps = [step_of(look) for look in looks]
    begun = any(look[rank.rank].averaged for look in looks)
    return {
        "model": case.title,
        "parameters": len(event.parameters),
        "steps compared": steps,
        "gradients differ at": [] if case.rule is EQUAL_REPLICAS else steps,
        "parameters differ at": [step_of(look) for look in looks if not same(look)],
        "collectives that carried them": "only before the first step" if begun else 0,
    }


# Nothing is exchanged of the whole model.

NEVER_WRAPPED = Rule(
    name="never-wrapped",
    when="no collective carries the gradients, and they differ",
    spots=("made", "step"),
    label="never wrapped",
    related=(("stepped here", "step"),),
    summary="{c.title} is trained {c.where}, but nothing synchronises its gradients, which differ",
    cause="{c.unwrapped}, and no collective carries its gradients, so each rank applies its own",
    fix="{c.wrap}",
    evidence=_evidence,
)
INDEPENDENT_MODELS = replace(
    NEVER_WRAPPED,
    name="independent-models",
    when="the ranks may be meant to train different models",
    severity=Severity.NOTE,
    confidence=Confidence.SUSPECTED,
    cause=NEVER_WRAPPED.cause + "; {c.doubt}: they may be meant to differ",
    fix="{c.wrap}; if each rank is to train its own (an ensemble, a fold, a personal head, a part "
    "of one model), silence this with `--ignore model-not-wrapped`",
)
OUTSIDE_GROUP = replace(
    NEVER_WRAPPED,
    name="ranks-outside-group",
    when="other ranks average the gradients of this model in their group",
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    cause=NEVER_WRAPPED.cause + "; {c.others_average} theirs in a group of their own",
    fix="create the group with all ranks that train this model, or use the default group",
)
EQUAL_REPLICAS = replace(
    NEVER_WRAPPED,
    name="equal-replicas",
    when="nothing is synchronised, but the ranks stay equal",
    severity=Severity.NOTE,
    summary="{c.title} is trained {c.where}, but {c.exchanged_nothing} exchanged: the ranks stay "
    "equal",
    cause="{c.kind} is not wrapped in DDP; the ranks have equal parameters and gradients in every "
    "examined step, so they all do the same work on the same data{c.or_on_that}",
    fix="if each rank should train on its share of the data, shard the data and wrap the model in "
    "DistributedDataParallel",
)

# Gradients are exchanged, and each rank applies its own all the same.

SYNCED_AFTER_STEP = replace(
    NEVER_WRAPPED,
    name="synced-after-step",
    when="collectives carry the gradients only after the optimizer's step",
    spots=("step", "made"),
    label="steps before the gradients are synchronised",
    related=(),
    summary="{c.title} is trained {c.where}, but its gradients are synchronised only after each "
    "rank has applied its own",
    cause="the gradients of {c.kind} are passed to collectives after the step, when each rank has "
    "already applied its own",
    fix="all-reduce them between `loss.backward()` and `optimizer.step()`",
)
RESULT_UNUSED = replace(
    NEVER_WRAPPED,
    name="allreduce-result-unused",
    when="copies of the gradients are all-reduced and not written back",
    spots=("copied", "made", "step"),
    label="reduces a copy, and the result is not used",
    related=(("applied here", "step"),),
    summary="{c.kind} is trained {c.where}; copies of its gradients are all-reduced, but every "
    "rank applies its own, which differ",
    cause="the collective gets a copy of the gradients, and its result is not written back: in "
    "every examined step the gradients applied are those from before the all-reduce",
    fix="write the result back before the step: `p.grad.copy_(...)` for every parameter, or "
    "all-reduce `p.grad` itself",
    evidence=lambda c: (
        _evidence(c)
        | {
            "ratio of norms, reduced copy to applied gradients": sorted(
                {round(s.copied, 4) for s in c.copies.states if s.copied}
            )
        }
    ),
)

# Copies beside other kinds of parallelism.

DATA_PARALLEL_GROUP = replace(
    NEVER_WRAPPED,
    name="data-parallel-group",
    when="beside model parallelism, a group of replicas averages nothing",
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    cause="{c.ranks_of_groups} start with the same parameters, which were sent over their group, "
    "but each rank applies its own gradients: afterwards the group exchanges fewer numbers than "
    "the parameters have, and what other groups exchange does not make them equal",
    fix="average the gradients over that group before the step: `dist.all_reduce(p.grad, "
    "group=data_parallel_group)` for every parameter, then divide by the group's size",
    evidence=lambda c: (
        _evidence(c)
        | {
            "groups": [{"ranks": sorted(group.members)} for group in c.groups],
            "numbers exchanged in them since": c.exchanged,
        }
    ),
)
SEQUENCE_PARALLEL = replace(
    NEVER_WRAPPED,
    name="sequence-parallel",
    when="the ranks work on parts of one batch, and do not sum their gradients",
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    cause="the ranks start with the same parameters, but each applies its own gradients: the "
    "all_to_all in forward and backward exchanges activations, not gradients of parameters, and "
    "nothing is exchanged between backward and step",
    fix="sum the gradients of all parts before the step: `for p in model.parameters(): "
    "dist.all_reduce(p.grad)` (divide by the number of ranks if each takes the mean of its part)",
)

# Something synchronises other parameters of the model.

AFTER_ALL_TO_ALL = Rule(
    name="after-all-to-all",
    when="beside parts that are divided, a part that every rank holds is not wrapped",
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    spots=("made", "step"),
    label="a part of it is not wrapped",
    related=(("applied here", "step"),),
    summary="{c.few} of the {c.all} parameters of {c.owner} without a wrapper {c.few:is|are} "
    "trained {c.where}, but nothing synchronises {c.few:its gradient|their gradients}, which "
    "{c.few:differs|differ}",
    cause="every rank has {c.few:this parameter|these}, and uses {c.few:it|them} on samples of its "
    "own, after the last all_to_all of the forward: the all_to_all of the backward carries nothing "
    "of {c.few:its gradient|their gradients}, and no other collective does",
    fix="{c.wrap_part}",
    evidence=lambda c: {
        "parameters": f"{c.few} of {c.all}",
        "steps compared": c.compared,
        "values differ from the start": "no" if same(c.look) else "yes",
    },
)
LEFT_OUT = Rule(
    name="left-out-by-optimizer",
    when="the optimizer's step synchronises other parameters of the model",
    label="does not synchronise some parameters",
    related=(("communicates the others", "exchange"), ("created here", "made")),
    summary="{c.few} of the {c.all} parameters of {c.owner} {c.few:is|are} trained {c.where}, but "
    "nothing synchronises {c.few:its|their} gradients, which differ",
    cause="{c.few:this parameter|these} and {c.rest} others start equal and get gradients that "
    "differ between ranks. The others stay equal, so the optimizer's step synchronises them; for "
    "{c.few:this parameter|these} every rank applies its own gradients",
    fix="all-reduce {c.few:its|their} gradients as well, in the optimizer's step or before it: "
    + AVERAGE,
    evidence=lambda c: {
        "parameters": f"{c.few} of {c.count}",
        "parameters that stay equal": c.rest,
        "steps compared": c.compared,
        "numbers exchanged since step 1": min(s.elements for s in c.copies.close[-1].values()),
    },
)
WITHOUT_HOOK = replace(
    LEFT_OUT,
    name="parameters-without-hook",
    when="hooks all-reduce other parameters of the model in the backward",
    spots=("made", "step"),
    label="some of its parameters have no hook",
    related=(("communicates the others", "exchange"), ("applied here", "step")),
    cause="collectives in backward carry the gradients of {c.rest} other parameters, which stay "
    "equal, but not {c.few:its|their} gradients: every rank applies its own",
    fix="register the hook for every parameter that requires a gradient, after the last one was "
    "added",
    evidence=lambda c: {
        "parameters": f"{c.few} of {c.count}",
        "parameters that stay equal": c.rest,
        "steps compared": c.compared,
        "numbers exchanged in each backward": sum(c.copies.sizes[i] for i in c.others),
    },
)
OTHERS_EXCHANGED = replace(
    LEFT_OUT,
    name="left-out-of-exchange",
    when="the program all-reduces gradients of other, smaller parts of the model",
    severity=Severity.WARNING,
    confidence=Confidence.SUSPECTED,
    spots=("exchange", "step", "made"),
    label="carries the gradients of other parameters only",
    related=(("applied here", "step"), ("created here", "made")),
    cause="the program passes the gradients of {c.rest} other {c.rest:parameter|parameters} to "
    "collectives, which makes them equal, but not {c.few:this one|these}: every rank applies its "
    "own",
    fix="all-reduce {c.few:its gradient|their gradients} as well: "
    + AVERAGE
    + "; if each rank is to have its own, silence this with `--ignore model-not-wrapped`",
    evidence=lambda c: {
        "parameters": f"{c.few} of {c.count}",
        "parameters whose gradients are exchanged": c.rest,
        "steps compared": c.compared,
    },
)
OTHER_OPTIMIZER_SYNCED = replace(
    LEFT_OUT,
    name="other-optimizer-synced",
    when="the parameters of another optimizer of the model stay equal",
    spots=("optimizer", "made", "step"),
    label="no gradients of this optimizer are synchronised",
    related=(("applied here", "step"),),
    cause="the other {c.rest} stay equal on all ranks, so something synchronises them; the "
    "gradients of {c.few:this parameter|these} were passed to no collective, and every rank "
    "applies its own",
    fix="average {c.few:its|their} gradients before the step as well: "
    + AVERAGE
    + ", or give {c.few:it|them} to the optimizer that synchronises the others",
    evidence=lambda c: _evidence(c) | {"parameters": f"{c.few} of {c.few + c.rest}"},
)

RULES = {
    rule.name: rule.when
    for rule in (
        NEVER_WRAPPED, SYNCED_AFTER_STEP, RESULT_UNUSED, WITHOUT_HOOK, LEFT_OUT,
        AFTER_ALL_TO_ALL, OTHERS_EXCHANGED, OTHER_OPTIMIZER_SYNCED, INDEPENDENT_MODELS,
        OUTSIDE_GROUP, DATA_PARALLEL_GROUP, SEQUENCE_PARALLEL, EQUAL_REPLICAS,
    )
}  # fmt: skip
