"""DDP405."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ddpdoctor.analysis.manual_sync.synced_replicas import averaged_replicas, member_of
from ddpdoctor.analysis.models.wrap_options import reduced
from ddpdoctor.analysis.rank_differences import ONLY_SOME
from ddpdoctor.analysis.replicas import optimizer_options, skipped_steps, state_loading, uncompared
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.group_findings import united
from ddpdoctor.analysis.replicas.optimizer_options import SET_ON_SOME, Skew, set_on_some
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import NO_COPIES, Replicas, replicas
from ddpdoctor.events import (
    EpochBegan,
    Hyperparameters,
    OptimizerSeen,
    StepDone,
)
from ddpdoctor.events.amp import told_at
from ddpdoctor.report.declarations import Condition, Effect, When
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Run, equal_ranks, odd_ones, ranks_do, ranks_text

SCHEDULED = ("lr", "momentum", "betas")
"""The options that torch's schedulers change."""

OTHER_ROUNDS = "different-rounds"
DECIDED_APART = "decided-per-rank"
SCHEDULER_ON_SOME = "scheduler-on-some-ranks"
LOCAL_METRIC = "rank-local-metric"
UNEQUAL_SCHEDULES = "unequal-schedules"
SET_PER_RANK = "set-per-rank"
SET_BESIDES = "set-besides-scheduler"
UNEQUAL_AT_START = "unequal-at-start"
UNKNOWN_LINE = "unknown-line"

STEP_EVERYWHERE = "step the scheduler on every rank"
SAME_SCHEDULE = (
    "create the scheduler with the same arguments on every rank, and step it at the same times"
)
SAME_ROUNDS = (
    "let all ranks take equally many steps between two changes: all-reduce what decides when a "
    "loop ends, a step is skipped or the value changes"
)
SAME_DECISION = "all-reduce what decides when the value changes, such as a loss or metric"
SAME_METRIC = (
    f"{STEP_EVERYWHERE}; pass ReduceLROnPlateau an all-reduced loss, so that it decides the same "
    "everywhere"
)
SAME_VALUE = (
    "compute the value once and send it to all ranks (`dist.broadcast_object_list`), or compute it "
    "from values that are equal on all of them (all-reduced)"
)

AHEAD = "the_same_values_first_on_ranks"
"""Evidence: the ranks that set the same values at earlier steps, where nothing else differs."""

LEFT_OUT = "the_same_values_but_for_a_few_on_ranks"
"""Evidence: the ranks that omit some values, as they took no step for a batch, for example."""


def _since_unequal(mine: Finding, other: Finding) -> bool:
    if other.steps is None or mine.steps is None:
        return True
    # Not every step is examined: the options may differ since just after the one before.
    equal = next((s for s in range(mine.steps.first - 1, -1, -1) if told_at(s)), 0)
    return other.steps.first > (equal + 1 if equal else mine.steps.first)


_LATER = Condition("after the options differ", _since_unequal)


class HyperparameterSkew(Check):
    """Ranks step with different learning rates or other optimizer options

    ## What it finds
    Options of the optimizer's parameter groups (learning rate, weight decay, momentum, ...) that
    differ between ranks at the same step: a rate that only one rank sets (`if rank == 0:`), a
    scheduler stepped on one rank only, `ReduceLROnPlateau`
    given a rank-local loss, a rate computed from the rank, optimizer or scheduler state loaded on
    one rank only.

    ## How it knows
    Each rank reads the options of the first 16 parameter groups before each of the first 128 steps
    of an optimizer, then before every second step, from step 256 on every fourth, and so on, and
    records them when they change. The options of the same step are compared between ranks.
    Scheduler calls and loaded state are recorded to find the cause. A difference proves the fault
    for the steps examined.

    ## Why it hurts
    Equal gradients applied with different rates give different models. They diverge from that step
    on, and no comparison of gradients shows it.

    ## How to fix it
    Step schedulers on every rank, with values that are equal everywhere: all-reduce the validation
    loss before `scheduler.step(loss)`; in Lightning, `self.log(..., sync_dist=True)`.

    ## When it stays quiet
    - Values that are equal up to float32 rounding (one rank's value may have been broadcast).
    - Ranks that train different models or parts of one.
    - Optimizers that split their parameters over the ranks, except those of which every rank holds
      a shard of each parameter (`fully_shard`).
    - Steps after one that some ranks skipped (see `parameter-drift`).
    - A rank that takes fewer steps per round, sets the same values sooner and finally leaves the
      others waiting: that finding includes it.
    """

    code = "DDP405"
    name = "hyperparameter-skew"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        **state_loading.RULES,
        OTHER_ROUNDS: "all ranks set the same values, but after different numbers of steps",
        DECIDED_APART: "all ranks set the same values, but some in an earlier epoch",
        SET_ON_SOME: "some ranks set the option under a condition on the rank, the others never do",
        SET_PER_RANK: "the program sets the option, not the same on all ranks",
        SCHEDULER_ON_SOME: "a scheduler is stepped on some ranks only, or more often",
        SET_BESIDES: "the program sets an option that a scheduler also changes",
        LOCAL_METRIC: "`ReduceLROnPlateau` gets a different metric on each rank",
        UNEQUAL_SCHEDULES: "the ranks step a scheduler at different times, or made it differently",
        UNEQUAL_AT_START: "the options differ when the optimizer first steps",
        UNKNOWN_LINE: "the options differ, and no line is known that sets them",
    }
    effects = (
        Effect(("parameter-drift",), when=(When.SAME_OPTIMIZER, _LATER)),
        Effect(("buffer-drift",), when=(_LATER,)),
        Effect(("optimizer-state-drift",), when=(_LATER, state_loading.OTHER_LOADS)),
        *state_loading.RESUMED_ALONE,
        Effect(("metric-not-reduced",), of=(LOCAL_METRIC,), when=(When.SAME_LINE,)),
    )

    def unobserved(self, run: Run) -> str | None:
        if not _copies(run):
            return NO_COPIES
        return None if run.any(Hyperparameters) else "no optimizer options were recorded"

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        return united(self._by_group(run))

    def _by_group(self, run: Run) -> Iterator[tuple[tuple[int, ...], Finding]]:
        reported: set[object] = set()
        for group in _copies(run):
            key = (tuple(group.members), group.any.optimizer)
            if key not in reported and not group.left_out:
                for finding in self._judge(group):
                    reported.add(key)
                    yield tuple(group.members), finding

    def _judge(self, group: Replicas) -> Iterator[Finding]:
        tables = {
            n: optimizer_options.by_step(m.rank, m.optimizer) for n, m in group.members.items()
        }
        # A rank that failed did not take the steps that others took after that.
        made = {n: m.rank.steps_of(m.optimizer) - 1 for n, m in group.members.items()}
        last = min(max(n, *tables[r], 0) for r, n in made.items())
        if (skipped := skipped_steps.before_a_step(group)) is not None:
            last = min(last, skipped.step - 1)  # from there on, step numbers do not match
        skewed = optimizer_options.skewed(tables, last)
        if not skewed:
            return
        first = skewed[0]
        values = optimizer_options.settled(
            {n: optimizer_options.at(table, first) for n, table in tables.items()}
        )
        options = optimizer_options.options(values)
        reported = {n: tuple(str(t[i].get(o)) for o, i in options) for n, t in values.items()}
        option, index = options[0]
        early = optimizer_options.ahead(tables, option, index)
        skew = Skew(group, option, first, odd_ones(equal_ranks(reported)), reported, early)
        early = () if skew.plateau else early
        short = optimizer_options.omitting(tables, option, index)
        why = next(cause for explain in EXPLANATIONS if (cause := explain(skew)))
        shown = {n: groups[index].get(option) for n, groups in values.items()}
        seen = ", first seen" if first and not told_at(first - 1) else ""
        yield self.finding(
            rule=why.rule,
            ranks=why.ranks or skew.ranks,
            steps=_extent(group, tables, skewed),
            subjects=tuple(dict.fromkeys(name for name, _ in options)),
            optimizers=(group.any.optimizer,),
            location=why.location,
            label=why.label,
            related=skew.related(why),
            summary=f"{option} differs between ranks{seen} at step {first}: "
            f"{optimizer_options.spelled(shown)}",
            cause=why.text,
            fix=why.fix,
            evidence={
                "values": [
                    {"option": name, "group": i, "step": first}
                    | {f"rank {n}": str(groups[i].get(name)) for n, groups in values.items()}
                    for name, i in options[:8]
                ],
                "option_changes_that_left_the_ranks_different": len(skewed),
                **({AHEAD: list(early)} if early else {}),
                **({LEFT_OUT: list(short)} if short else {}),
            }
            | why.evidence,
            at=skew.at,
        )


def _copies(run: Run) -> list[Replicas]:
    return [*replicas(run), *averaged_replicas(run), *_in_pieces(run)]


def _in_pieces(run: Run) -> Iterator[Replicas]:
    """Optimizers of ranks that each hold a shard of the same parameters (`fully_shard`)."""
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Member]] = {}
    for number, rank in run.ranks.items():
        for event in rank.of(OptimizerSeen):
            if len(event.pieces) > 1:
                groups.setdefault((event.optimizer, event.pieces), {})[number] = member_of(
                    rank, event
                )
    for (_, pieces), members in groups.items():
        if set(members) == set(pieces):
            yield Replicas(members)


def _extent(
    group: Replicas, tables: Mapping[int, optimizer_options.Table], skewed: list[int]
) -> Steps:
    """The steps at which options differ: values hold until the next recorded change."""
    reported = sorted({s for table in tables.values() for s in table})
    last = max(skewed[-1], min(m.last_step for m in group.members.values()))
    ends = [next((s for s in reported if s > step), last + 1) for step in skewed]
    steps = [s for step, end in zip(skewed, ends, strict=True) for s in range(step, end)]
    looks = [s for s in range(skewed[0], last + 1) if told_at(s)]
    if len(looks) == last + 1 - skewed[0]:
        return Steps(skewed[0], steps[-1], len(steps))
    differing = [s for s in steps if told_at(s)]
    return Steps(skewed[0], differing[-1], len(differing), len(looks))


def _from_a_load(skew: Skew) -> Cause | None:
    """Only some ranks loaded the state of the optimizer, or of a scheduler, just before."""
    for what in ("optimizer", "scheduler"):
        loads = state_loading.Loads(skew.group, what, skew.at)
        some = loads.on_some
        if some is None or len({v for n, v in skew.values.items() if n not in some.ranks}) != 1:
            continue
        if what == "optimizer":  # it sets the options at once
            done = skew.group.members[some.ranks[0]].of(StepDone)
            follows = all(e.at <= some.event.at for e in done if e.step < skew.first)
        else:
            follows = skew.option in SCHEDULED and skew.stepped_equally
        if follows and (cause := loads.cause()):
            return replace(cause, text=f"{cause.text}; that sets {skew.option}")
    return None


def _in_different_rounds(skew: Skew) -> Cause | None:
    """All ranks set the same values without a scheduler, only at different steps."""
    if not skew.early or skew.set_line is None or skew.stepping:
        return None
    first = f"{ranks_do(skew.early, 'get')} to a new value"
    if _equal_epochs(skew):
        rule, fix, where = DECIDED_APART, SAME_DECISION, "in different epochs"
        text = (
            f"take equally many steps per epoch, but {first} in an earlier one: each decides for "
            "itself when it changes, by what differs on each, such as a loss of its own data"
        )
    else:
        rule, fix, where = OTHER_ROUNDS, SAME_ROUNDS, "at different steps"
        text = f"take different numbers of steps between two changes: {first} first"
    return Cause(
        rule,
        text=f"all ranks set the same values in the same order and {text}",
        fix=fix,
        label=f"set to the same values on all ranks, but {where}",
        location=skew.set_line,
    )


def _equal_epochs(skew: Skew) -> bool:
    """Whether all ranks begin the epochs of their loaders after equally many steps."""
    begun = {
        tuple((e.loader, e.epoch, e.step) for e in m.rank.of(EpochBegan))
        for m in skew.group.members.values()
    }
    return len(begun) == 1 and len({step for _, _, step in begun.pop()}) > 1


def _scheduled(skew: Skew) -> bool:
    """Whether a scheduler may change the option."""
    return bool(skew.stepping) and skew.option in SCHEDULED


def _set_on_some(skew: Skew) -> Cause | None:
    """Only some ranks run the line that sets the option."""
    return None if _scheduled(skew) else set_on_some(skew)


def _set_per_rank(skew: Skew) -> Cause | None:
    """A line sets the option, and no scheduler is there to change it."""
    if skew.set_line is None or _scheduled(skew):
        return None
    text, label = optimizer_options.set_apart(skew.ranks, skew.group.members)
    return Cause(SET_PER_RANK, text, SAME_VALUE, label, skew.set_line)


def _scheduler_on_some(skew: Skew) -> Cause | None:
    """Only some ranks step a scheduler, or step it at one more line."""
    lines = {
        n: {str(spot): c for c in calls if (spot := skew.line_of(n, c)) is not None}
        for n, calls in skew.calls.items()
    }
    ranks, also = skew.stepping, ""
    call = skew.calls[ranks[0]][0] if ranks else None
    if len(ranks) == len(skew.calls):
        common = set.intersection(*(set(found) for found in lines.values()))
        line = min({line for found in lines.values() for line in found} - common, default="")
        ranks = [n for n, found in lines.items() if line in found] if common else []
        call, also = lines[ranks[0]][line] if ranks else None, " at this line as well,"
    if call is None:
        return None
    text = f"{call.kind}.step is called{also} on {ranks_text(ranks)} only"
    fix = SAME_METRIC if skew.plateau else STEP_EVERYWHERE
    return Cause(SCHEDULER_ON_SOME, text, fix, ONLY_SOME, skew.line_of(ranks[0], call))


def _set_besides(skew: Skew) -> Cause | None:
    """A line sets the option while all ranks step a scheduler equally."""
    if skew.set_line is None or not skew.stepped_equally or skew.plateau or not skew.stepping:
        return None
    number = skew.stepping[0]
    call = skew.calls[number][-1]
    scheduled = skew.line_of(number, call)
    text = f"{skew.option} is also set here, while all ranks step {call.kind} equally"
    related = (Related(f"steps {call.kind}", scheduled),) if scheduled else ()
    return Cause(
        SET_BESIDES, text, SAME_VALUE, optimizer_options.SET_HERE, skew.set_line, related=related
    )


def _scheduler_decides(skew: Skew) -> Cause | None:
    """All ranks step a scheduler, which does not do the same on each."""
    if not skew.stepping:
        return None
    calls = skew.calls[skew.stepping[0]]
    call = next((c for c in calls if "Plateau" in c.kind), calls[-1])
    spot = skew.line_of(skew.stepping[0], call)
    if skew.plateau:
        text = "ReduceLROnPlateau gets a different metric on each rank and decides locally"
        label = "decides from each rank's local metric"
        if (logged := call.logged) is None:
            return Cause(LOCAL_METRIC, text, SAME_METRIC, label, spot)
        logs = skew.group.members[skew.stepping[0]].rank.location(logged.site)
        return Cause(
            LOCAL_METRIC,
            text=f"{text}: `{logged.name}`, which is not reduced where it is logged",
            fix=reduced(logged.by, logged.name, logs),
            label=f"logs each rank's own `{logged.name}`",
            location=logs or spot,
            related=(Related(f"{call.kind} {label}", spot),) if spot else (),
        )
    text = f"the ranks step {call.kind} at different times, or created it differently"
    return Cause(UNEQUAL_SCHEDULES, text, SAME_SCHEDULE, "steps, but not equally", spot)


def _unequal_at_start(skew: Skew) -> Cause | None:
    made = skew.group.line(OptimizerSeen, skew.ranks)
    if skew.first or made is None:
        return None
    if (schedule := _scheduled_apart(skew)) is not None:
        return schedule
    text = "the options differ from the first step on: the optimizer was created with them, or "
    text += "they were set before it stepped"
    label = "options differ between ranks at the first step"
    return Cause(UNEQUAL_AT_START, text, SAME_VALUE, label, made)


def _scheduled_apart(skew: Skew) -> Cause | None:
    """All ranks made a scheduler with the same rates to start from, and it gave other ones."""
    began = {n: next(iter(m.of(Hyperparameters)), None) for n, m in skew.group.members.items()}
    events = [event for event in began.values() if event is not None]
    if skew.option not in SCHEDULED or len(events) < len(began):
        return None
    if not all(e.scheduler for e in events) or len({e.initial for e in events}) != 1:
        return None
    number, event = next(zip(began, events, strict=True))
    text = f"{event.scheduler} computes another rate on each rank, from the same one to start from"
    spot = skew.group.members[number].rank.location(event.scheduler_site)
    return Cause(UNEQUAL_SCHEDULES, text, SAME_SCHEDULE, "made differently on the ranks", spot)


def _unknown_line(skew: Skew) -> Cause:
    step = skew.group.line(Hyperparameters, skew.ranks)
    text, _ = optimizer_options.set_apart(skew.ranks, skew.group.members)
    return Cause(UNKNOWN_LINE, text, SAME_VALUE, "steps with different options", step)


EXPLANATIONS: tuple[Callable[[Skew], Cause | None], ...] = (
    _from_a_load,
    _in_different_rounds,
    _set_on_some,
    _set_per_rank,
    _scheduler_on_some,
    _set_besides,
    _scheduler_decides,
    _unequal_at_start,
    _unknown_line,
)
"""Why options differ, in the order in which they are tried; the first that answers names the rule,
the line, the cause and the fix."""
