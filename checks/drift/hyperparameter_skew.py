"""DDP405."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from ddpdoctor.events import Hyperparameters, OptimizerSeen, SchedulerStep
from ddpdoctor.events.amp import told_at
from ddpdoctor.findings import Check, Finding, Location, Related, Severity, Steps
from ddpdoctor.run import Run, equal_ranks, odd_ones, ranks_do, ranks_text

from ._replicas import NO_COPIES, Member, Replicas, replicas

Value = float | bool | str
Groups = tuple[dict[str, Value], ...]

ROUNDING = 2.0**-23
"""Relative distance of neighbours in float32: a value that was broadcast in it is the same."""

SCHEDULED = ("lr", "momentum", "betas")
"""What torch's own schedulers change."""

SCHEDULE_ALIKE = (
    "step the scheduler on every rank; feed ReduceLROnPlateau a loss that was all-reduced, so that "
    "it decides the same everywhere"
)
SET_ALIKE = (
    "compute the value once and send it to all ranks (`dist.broadcast_object_list`), or compute it "
    "from numbers that are equal on all of them (all-reduced)"
)


class HyperparameterSkew(Check):
    """The ranks step with different learning rates or other options

    ## What it finds
    Values of the optimizer's parameter groups (learning rate, weight decay, momentum, ...) that
    differ between ranks at the same step: a scheduler stepped on one rank only,
    `ReduceLROnPlateau` fed with a local loss, a rate computed from the rank.

    ## Why it hurts
    Equal gradients applied with different rates give different models. They drift apart from that
    step on, and no gradient check sees it.

    ## How to fix it
    Step schedulers on every rank, and feed them numbers that are equal everywhere: all-reduce the
    validation loss before `scheduler.step(loss)`.

    ## When it stays quiet
    Equal values, up to the rounding of a float32, in which one rank's may have been sent; ranks
    that train different models or parts of one; optimizers that split their parameters over the
    ranks.
    """

    code = "DDP405"
    name = "hyperparameter-skew"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if not replicas(run):
            return NO_COPIES
        return None if run.any(Hyperparameters) else "no optimizer's options were seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        told: set[object] = set()
        for group in replicas(run):
            key = (tuple(group.members), group.any.optimizer)
            if key not in told and not group.left_out:
                for finding in self._judge(group):
                    told.add(key)
                    yield finding

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check not in ("parameter-drift", "buffer-drift", "optimizer-state-drift"):
            return False
        if other.steps is None or mine.steps is None:
            return True
        # Not every step is looked at: they may have differed since just after the look before.
        equal = next((s for s in range(mine.steps.first - 1, -1, -1) if told_at(s)), 0)
        return other.steps.first > (equal + 1 if equal else mine.steps.first)

    def _judge(self, group: Replicas) -> Iterator[Finding]:
        tables = {n: _table(m) for n, m in group.members.items()}
        skewed = _skewed(tables)
        if not skewed:
            return
        first = skewed[0]
        values = _settled({n: _at(table, first) for n, table in tables.items()})
        options = _options(values)
        told = {n: tuple(str(t[i].get(o)) for o, i in options) for n, t in values.items()}
        ranks = odd_ones(equal_ranks(told))
        option, index = options[0]
        spot, label, cause, related, fix = _why(group, ranks, option, first)
        shown = {n: groups[index].get(option) for n, groups in values.items()}
        seen = ", first seen" if first and not told_at(first - 1) else ""
        yield self.finding(
            ranks=ranks,
            steps=_extent(group, tables, skewed),
            subjects=tuple(dict.fromkeys(name for name, _ in options)),
            location=spot,
            label=label,
            related=related,
            summary=f"{option} differs between ranks{seen} at step {first}: {_spell(shown)}",
            cause=cause,
            fix=fix,
            evidence={
                "values": [
                    {"option": name, "group": i, "step": first}
                    | {f"rank {n}": str(groups[i].get(name)) for n, groups in values.items()}
                    for name, i in options[:8]
                ],
                "changes_after_which_they_differ": len(skewed),
            },
            at=min(m.rank.wall(_time(m, first)) for m in group.members.values()),
        )


def _table(member: Member) -> dict[int, Groups]:
    return {
        e.step: e.groups for e in member.rank.of(Hyperparameters) if e.optimizer == member.optimizer
    }


def _at(table: dict[int, Groups], step: int) -> Groups:
    return table[max(s for s in table if s <= step)]


def _skewed(tables: dict[int, dict[int, Groups]]) -> list[int]:
    """The steps at which any rank told a change and the values are not equal."""
    told = sorted({s for table in tables.values() for s in table if told_at(s)})
    begun = [s for s in told if all(min(t, default=1 << 60) <= s for t in tables.values())]
    found = []
    for step in begun:
        at = {n: _at(table, step) for n, table in tables.items()}
        if len({len(groups) for groups in at.values()}) > 1:
            continue
        values = list(_settled(at).values())
        if any(v != values[0] for v in values):
            found.append(step)
    return found


def _settled(values: dict[int, Groups]) -> dict[int, Groups]:
    """The same, where what differs by rounding alone stands as the first rank has it."""
    first = next(iter(values.values()))

    def settle(group: dict[str, Value], known: dict[str, Value]) -> dict[str, Value]:
        return {o: known[o] if o in known and _alike(v, known[o]) else v for o, v in group.items()}

    return {
        n: tuple(settle(group, known) for group, known in zip(groups, first, strict=True))
        for n, groups in values.items()
    }


def _alike(one: Value, other: Value) -> bool:
    """Whether two values, or two sequences of them as they are spelled out, are the same."""
    if one == other:
        return True
    pairs = list(zip(str(one).split(", "), str(other).split(", "), strict=False))
    try:
        return str(one).count(", ") == str(other).count(", ") and all(
            math.isclose(float(a), float(b), rel_tol=ROUNDING) for a, b in pairs
        )
    except ValueError:  # words
        return False


def _options(values: dict[int, Groups]) -> list[tuple[str, int]]:
    """(option, group) that differ; the learning rate first."""
    tables = list(values.values())
    found = [
        (name, i)
        for i in range(len(tables[0]))
        for name in tables[0][i]
        if len({str(t[i].get(name)) for t in tables}) > 1
    ]
    return sorted(found, key=lambda o: o[0] != "lr")


def _extent(group: Replicas, tables: dict[int, dict[int, Groups]], skewed: list[int]) -> Steps:
    """Values stand until the next change that is told."""
    told = sorted({s for table in tables.values() for s in table})
    last = max(skewed[-1], min(m.last_step for m in group.members.values()))
    ends = [next((s for s in told if s > step), last + 1) for step in skewed]
    steps = [s for step, end in zip(skewed, ends, strict=True) for s in range(step, end)]
    looks = [s for s in range(skewed[0], last + 1) if told_at(s)]
    if len(looks) == last + 1 - skewed[0]:
        return Steps(skewed[0], steps[-1], len(steps))
    differing = [s for s in steps if told_at(s)]
    return Steps(skewed[0], differing[-1], len(differing), len(looks))


def _set_by_hand(
    group: Replicas, ranks: tuple[int, ...], option: str, step: int
) -> Location | None:
    """The user's own line that gave an option its new value."""
    for number in (*ranks, *group.members):
        member = group.members[number]
        for event in member.rank.of(Hyperparameters):
            known = event.optimizer == member.optimizer and event.step <= step
            spot = member.rank.location(event.set_sites.get(option, -1)) if known else None
            if spot is not None:
                return spot
    return None


def _why(
    group: Replicas, ranks: tuple[int, ...], option: str, first: int
) -> tuple[Location | None, str, str, tuple[Related, ...], str]:
    """The scheduler that only some ranks step, the one that decides locally, or what set it."""
    members = group.members
    calls = {n: m.rank.of(SchedulerStep) for n, m in members.items()}
    stepping = [n for n, c in calls.items() if c]
    step = _step_line(group, ranks)
    related = (Related("stepped here", step),) if step else ()
    by_hand = _set_by_hand(group, ranks, option, first)
    if by_hand is not None and (not stepping or option not in SCHEDULED):
        label, text = "set here, not alike on all ranks", "the options were set per rank"
        return by_hand, label, text, related, SET_ALIKE
    if stepping and len(stepping) < len(members):
        call = calls[stepping[0]][0]
        who = ranks_text(stepping)
        text = f"{call.kind}.step is called on {who} only"
        spot = members[stepping[0]].rank.location(call.site)
        label = f"only {ranks_do(stepping, 'come')} here"
        return spot, label, text, related, SCHEDULE_ALIKE
    alike = len({tuple((c.kind, c.step, c.call) for c in mine) for mine in calls.values()}) == 1
    plateau = any("Plateau" in c.kind for mine in calls.values() for c in mine)
    if by_hand is not None and alike and not plateau:
        call = calls[stepping[0]][-1]
        scheduled = members[stepping[0]].rank.location(call.site)
        beside = (Related(f"{call.kind} stepped here", scheduled),) if scheduled else ()
        text = f"{option} is set by hand besides, and all ranks step {call.kind} alike"
        label = "set here, not alike on all ranks"
        return by_hand, label, text, (*related, *beside), SET_ALIKE
    if stepping:
        call = next((c for c in calls[stepping[0]] if "Plateau" in c.kind), calls[stepping[0]][-1])
        spot = members[stepping[0]].rank.location(call.site)
        if "Plateau" in call.kind:
            text = "ReduceLROnPlateau is fed another metric on each rank and decides by itself"
            return spot, "decides from this rank's own metric", text, related, SCHEDULE_ALIKE
        text = f"the ranks step {call.kind} at different times, or made it differently"
        return spot, "steps on every rank, but not alike", text, related, SCHEDULE_ALIKE
    if first == 0 and (made := _made_line(group, ranks)) is not None:
        text = "the options differ from the first step on: the optimizer was made with them, or "
        text += "they were set before it stepped"
        return made, "made here, not alike on all ranks", text, related, SET_ALIKE
    return step, "steps with different options", "the options were set per rank", (), SET_ALIKE


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


def _spell(shown: Mapping[int, object]) -> str:
    by_value: dict[object, list[int]] = {}
    for number, value in shown.items():
        by_value.setdefault(value, []).append(number)
    parts = [
        f"{v:.9g} on {ranks_text(r)}" if isinstance(v, float) else f"{v} on {ranks_text(r)}"
        for v, r in by_value.items()
    ]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more values" if len(parts) > 4 else "")
