"""DDP405."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import ClassVar

from ddpdoctor.analysis.manual_sync import kept_equal, never_synced, unequal_updates
from ddpdoctor.analysis.manual_sync.copies import trained_copies
from ddpdoctor.analysis.replicas import optimizer_options, skipped_steps, state_loading, uncompared
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.group_findings import united
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import NO_COPIES, Replicas, replicas
from ddpdoctor.events import (
    Hyperparameters,
    OptimizerSeen,
    Replica,
    SchedulerStep,
    StepDone,
    Unwrapped,
    Wrapped,
)
from ddpdoctor.events.amp import told_at
from ddpdoctor.report.declarations import Condition, Effect, When
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, equal_ranks, odd_ones, ranks_do, ranks_text

SCHEDULED = ("lr", "momentum", "betas")
"""The options that torch's schedulers change."""

OTHER_ROUNDS = "different-rounds"
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
    differ between ranks at the same step: a scheduler stepped on one rank only, `ReduceLROnPlateau`
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
    loss before `scheduler.step(loss)`.

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
        ranks = odd_ones(equal_ranks(reported))
        option, index = options[0]
        at = min(m.rank.wall(_time(m, first)) for m in group.members.values())
        early = () if _plateau(group, first) else optimizer_options.ahead(tables, option, index)
        short = optimizer_options.omitting(tables, option, index)
        why = (
            _from_a_load(group, reported, option, first, at)
            or _in_different_rounds(group, early, option, first)
            or _why(group, ranks, option, first)
        )
        shown = {n: groups[index].get(option) for n, groups in values.items()}
        seen = ", first seen" if first and not told_at(first - 1) else ""
        yield self.finding(
            rule=why.rule,
            ranks=why.ranks or ranks,
            steps=_extent(group, tables, skewed),
            subjects=tuple(dict.fromkeys(name for name, _ in options)),
            optimizers=(group.any.optimizer,),
            location=why.location,
            label=why.label,
            related=why.related,
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
            at=at,
        )


def _copies(run: Run) -> list[Replicas]:
    return [*replicas(run), *_manually_synced(run), *_in_pieces(run)]


def _manually_synced(run: Run) -> Iterator[Replicas]:
    """Copies without a wrapper that apply equal gradients from the first step on."""
    for copies in trained_copies(run):
        equal = never_synced.steady(copies) and unequal_updates.agree(
            never_synced.close_looks(copies)
        )
        if equal and not kept_equal.kept_equal(copies):
            yield Replicas({n: _member(*pair) for n, pair in copies.members.items()})


def _in_pieces(run: Run) -> Iterator[Replicas]:
    """Optimizers of ranks that each hold a shard of the same parameters (`fully_shard`)."""
    groups: dict[tuple[int, tuple[int, ...]], dict[int, Member]] = {}
    for number, rank in run.ranks.items():
        for event in rank.of(OptimizerSeen):
            if len(event.pieces) > 1:
                groups.setdefault((event.optimizer, event.pieces), {})[number] = _member(
                    rank, event
                )
    for (_, pieces), members in groups.items():
        if set(members) == set(pieces):
            yield Replicas(members)


def _member(rank: Rank, event: Unwrapped | OptimizerSeen) -> Member:
    """A rank's copy, described like one with a wrapper."""
    seen = Replica(at=event.at, model=-1, optimizer=event.optimizer, ranks=(), parameters="")
    origin = Wrapped(at=event.at, model=-1, wrapper="", kind=event.kind, group=-1, site=event.site)
    return Member(rank, seen, origin)


def _extent(
    group: Replicas, tables: dict[int, dict[int, optimizer_options.Groups]], skewed: list[int]
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


def _set_line(group: Replicas, ranks: tuple[int, ...], option: str, step: int) -> Location | None:
    """The line of the program that set an option, on the ranks at fault first."""
    members = (group.members[number] for number in (*ranks, *group.members))
    spots = (optimizer_options.set_at(m.rank, m.optimizer, option, step) for m in members)
    return next((spot for spot in spots if spot is not None), None)


def _scheduled(member: Member, first: int) -> list[SchedulerStep]:
    """Calls of the optimizer's schedulers; only those before its first step where the options
    differ at that step (`first` is 0)."""
    seen = (e.at for e in member.rank.of(OptimizerSeen) if e.optimizer == member.optimizer)
    before = inf if first else next(seen, inf)
    calls = member.rank.of(SchedulerStep)
    return [c for c in calls if c.optimizer in (-1, member.optimizer) and c.at <= before]


def _plateau(group: Replicas, first: int) -> bool:
    """Whether one of the schedulers decides by a metric (`ReduceLROnPlateau`)."""
    return any("Plateau" in c.kind for m in group.members.values() for c in _scheduled(m, first))


def _line_of_some(group: Replicas, first: int) -> tuple[list[int], SchedulerStep, Location] | None:
    """A line that steps a scheduler on some ranks only, while other lines do on all ranks: these
    ranks, a call and the line."""
    lines: dict[int, dict[str, tuple[SchedulerStep, Location]]] = {
        n: {
            str(at): (call, at)
            for call in _scheduled(m, first)
            if (at := m.rank.location(call.site)) is not None
        }
        for n, m in group.members.items()
    }
    common = set.intersection(*(set(found) for found in lines.values()))
    line = min({line for found in lines.values() for line in found} - common, default=None)
    if line is None or not common:
        return None
    on = [n for n, found in lines.items() if line in found]
    call, at = lines[on[0]][line]
    return on, call, at


def _from_a_load(
    group: Replicas, reported: dict[int, tuple[str, ...]], option: str, first: int, at: float
) -> Cause | None:
    """Only some ranks loaded the state of the optimizer, or of a scheduler, just before."""
    for what in ("optimizer", "scheduler"):
        some = state_loading.of_some(group, what, at)
        if some is None or len({reported[n] for n in reported if n not in some.ranks}) != 1:
            continue
        member = group.members[some.ranks[0]]
        if what == "optimizer":  # it sets the options at once
            done = [e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer]
            follows = all(e.at <= some.event.at for e in done if e.step < first)
        else:
            follows = option in SCHEDULED and _stepped_equally(group, first)
        if follows:
            cause = state_loading.by_some(group, what, some, at)
            step = _step_line(group, some.ranks)
            return replace(
                cause,
                text=f"{cause.text}; that sets {option}",
                related=(*cause.related, *_stepped_here(step)),
            )
    return None


def _in_different_rounds(
    group: Replicas, early: tuple[int, ...], option: str, first: int
) -> Cause | None:
    """All ranks set the same values without a scheduler, only at different steps."""
    spot = _set_line(group, early, option, first)
    if not early or spot is None or any(_scheduled(m, first) for m in group.members.values()):
        return None
    return Cause(
        OTHER_ROUNDS,
        text="all ranks set the same values in the same order, but take different numbers of steps "
        f"between two changes: {ranks_do(early, 'get')} to a new value first",
        fix=SAME_ROUNDS,
        label="set to the same values on all ranks, but at different steps",
        location=spot,
        related=_stepped_here(_step_line(group, early)),
    )


def _stepped_equally(group: Replicas, first: int) -> bool:
    """Whether all ranks make the same scheduler calls at the same steps."""
    calls = [_scheduled(m, first) for m in group.members.values()]
    return len({tuple((c.kind, c.step, c.call) for c in mine) for mine in calls}) == 1


def _stepped_here(step: Location | None) -> tuple[Related, ...]:
    return (Related("applied here", step),) if step else ()


def _why(group: Replicas, ranks: tuple[int, ...], option: str, first: int) -> Cause:
    """The first explanation that applies: a line that sets the option for no scheduler to change,
    a scheduler that only some ranks step, a line that also sets it, a scheduler that decides
    differently on each rank, options that differ from the start."""
    members = group.members
    calls = {n: _scheduled(m, first) for n, m in members.items()}
    stepping = [n for n, c in calls.items() if c]
    step = _step_line(group, ranks)
    related = _stepped_here(step)
    set_line = _set_line(group, ranks, option, first)
    if set_line is not None and (not stepping or option not in SCHEDULED):
        return Cause(SET_PER_RANK, PER_RANK, SAME_VALUE, SET_HERE, set_line, related=related)
    plateau = _plateau(group, first)
    everywhere = SAME_METRIC if plateau else STEP_EVERYWHERE
    if stepping and len(stepping) < len(members):
        call = calls[stepping[0]][0]
        text = f"{call.kind}.step is called on {ranks_text(stepping)} only"
        spot = members[stepping[0]].rank.location(call.site)
        return Cause(SCHEDULER_ON_SOME, text, everywhere, ONLY_SOME, spot, related=related)
    if (more := _line_of_some(group, first)) is not None:
        on, call, spot = more
        text = f"{call.kind}.step is called at this line as well, on {ranks_text(on)} only"
        return Cause(SCHEDULER_ON_SOME, text, everywhere, ONLY_SOME, spot, related=related)
    if set_line is not None and _stepped_equally(group, first) and not plateau:
        call = calls[stepping[0]][-1]
        scheduled = members[stepping[0]].rank.location(call.site)
        also = (Related(f"steps {call.kind}", scheduled),) if scheduled else ()
        text = f"{option} is also set here, while all ranks step {call.kind} equally"
        return Cause(SET_BESIDES, text, SAME_VALUE, SET_HERE, set_line, related=(*related, *also))
    if stepping:
        call = next((c for c in calls[stepping[0]] if "Plateau" in c.kind), calls[stepping[0]][-1])
        spot = members[stepping[0]].rank.location(call.site)
        if plateau:
            text = "ReduceLROnPlateau gets a different metric on each rank and decides locally"
            label = "decides from each rank's local metric"
            return Cause(LOCAL_METRIC, text, SAME_METRIC, label, spot, related=related)
        text = f"the ranks step {call.kind} at different times, or created it differently"
        label = "steps on every rank, but not equally"
        return Cause(UNEQUAL_SCHEDULES, text, SAME_SCHEDULE, label, spot, related=related)
    if first == 0 and (made := _made_line(group, ranks)) is not None:
        text = "the options differ from the first step on: the optimizer was created with them, or "
        text += "they were set before it stepped"
        label = "options differ between ranks at the first step"
        return Cause(UNEQUAL_AT_START, text, SAME_VALUE, label, made, related=related)
    return Cause(UNKNOWN_LINE, PER_RANK, SAME_VALUE, "steps with different options", step)


PER_RANK = "the options are set differently on each rank"
SET_HERE = "set to different values on different ranks"
ONLY_SOME = state_loading.ONLY_SOME


def _made_line(group: Replicas, ranks: tuple[int, ...]) -> Location | None:
    for number in (*ranks, *group.members):
        member = group.members[number]
        for event in member.rank.of(OptimizerSeen):
            spot = member.rank.location(event.site) if event.optimizer == member.optimizer else None
            if spot is not None:
                return spot
    return None


def _step_line(group: Replicas, ranks: tuple[int, ...]) -> Location | None:
    for number in (*ranks, *group.members):
        rank = group.members[number].rank
        for event in rank.of(Hyperparameters):
            if event.optimizer == group.members[number].optimizer:
                return rank.location(event.site)
    return None


def _time(member: Member, step: int) -> float:
    events = [e for e in member.rank.of(Hyperparameters) if e.optimizer == member.optimizer]
    return next((e.at for e in events if e.step >= step), events[-1].at if events else 0.0)
