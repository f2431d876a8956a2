"""Steps before which ranks run different numbers of backwards, where every backward communicates:
from there on calls of one step are matched with those of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ...events import StepDone
from ...report.findings import Evidence, FixKind, Related, Requirement, Steps
from ...run import Location, Rank, Run, counted, ranks_text
from ...run.phrases import listed
from ..calls.call_logs import NEW_GROUPS, CallLogs, CallRecord, GroupCalls, GroupKey, call_logs
from .jumps import Key, loops_around, uneven

LOOKED_AT = 64
"""Calls that one rank makes in a step beyond those of another, of which the lines are read."""

RULE = "uneven-backwards"
TEXT = "ranks run different numbers of backwards in a step, and each of them communicates"
FIX = (
    "run the same number of micro-batches on all ranks in each step: `dist.all_reduce` the number "
    "with `op=dist.ReduceOp.MAX` before the batch is split, and split it into that many (or add "
    "rounds with `loss * 0`)"
)


@dataclass(frozen=True)
class UnevenBackwards:
    """The first such step of the ranks of a group.

    Attributes:
        ranks: that took it.
        step: of `optimizer`, the first one; `last` the last, `count` of them.
        backwards: by rank, how many it ran since the step before.
        calls: by rank, how many it had made in the group when it took the step; `each`: in each
            backward and the forward before it.
        loop: the loop around these calls, where it is known; step_site: the line of the step.
    """

    key: GroupKey
    ranks: tuple[Rank, ...]
    optimizer: int
    step: int
    last: int
    count: int
    backwards: dict[int, int]
    calls: dict[int, int]
    each: int
    made: CallRecord
    loop: Location | None
    step_site: int
    at: float

    @property
    def begin(self) -> int:
        """The first call that ranks make in different steps."""
        return min(self.calls.values())

    @property
    def steps(self) -> Steps:
        return Steps(self.step, self.last, self.count)

    @property
    def numbers(self) -> str:
        """`5 on rank 0 and 6 on rank 1`."""
        sides: dict[int, list[int]] = {}
        for rank, number in sorted(self.backwards.items()):
            sides.setdefault(number, []).append(rank)
        return listed([f"{number} on {ranks_text(side)}" for number, side in sides.items()])

    @property
    def cause(self) -> str:
        makes = counted(self.each, "call")
        return (
            f"in step {self.step} the number of backwards is {self.numbers}, and each of them "
            f"makes {makes} in {self.key} (with its forward). Calls are matched by their number: "
            f"from call {self.begin} on, those of one step on some ranks are matched with those of "
            "another step on others, so ranks mix different micro-batches, gradients and shards of "
            "different steps"
        )

    @property
    def label(self) -> str:
        return f"not the same number of rounds on all ranks in step {self.step}"

    @property
    def evidence(self) -> Evidence:
        return {
            "backwards_in_the_step": {f"rank {r}": n for r, n in self.backwards.items()},
            "calls_up_to_the_step": {f"rank {r}": n for r, n in self.calls.items()},
        }

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a finding about it alone."""
        made, rank = self.made.location, self.made.rank
        lines = {
            "calls that other ranks do not make in this step": made if self.loop else None,
            "the step": rank.location(self.step_site),
        }
        return {
            "rule": RULE,
            "ranks": tuple(rank.rank for rank in self.ranks),
            "steps": self.steps,
            "optimizers": (self.optimizer,),
            "location": self.loop or made,
            "label": self.label,
            "related": tuple(Related(label, line) for label, line in lines.items() if line),
            "summary": f"ranks are in different steps since step {self.step}, whose backwards are "
            f"{self.numbers}, and each of these communicates",
            "cause": self.cause,
            "fix": FIX,
            "fix_kind": FixKind.CHECK,
            "evidence": self.evidence,
            "at": self.at,
        }


@lru_cache(maxsize=1)
def uneven_backwards(run: Run) -> tuple[UnevenBackwards, ...]:
    """For each group whose calls are shifted by it, the first step; the earliest come first."""
    known = call_logs(run)
    found = [
        one
        for key, logs, optimizer in _groups(known)
        if (one := _first(known, key, logs, optimizer)) is not None
    ]
    return tuple(sorted(found, key=lambda one: one.at))


def compared(run: Run) -> bool:
    """Whether there are steps of several ranks that communicate in one group."""
    return next(_groups(call_logs(run)), None) is not None


def unless_compared(requirement: Requirement) -> Requirement:
    """A requirement that does not matter where the backwards of ranks are compared."""
    return lambda run: None if compared(run) else requirement(run)


def _groups(known: CallLogs) -> Iterator[tuple[GroupKey, dict[int, GroupCalls], int]]:
    for key, logs in known.logs.items():
        training = {r: log for r, log in logs.items() if log.rank.of(StepDone)}
        if len(training) < 2 or any(log.group == NEW_GROUPS for log in logs.values()):
            continue
        each = ({e.optimizer for e in log.rank.of(StepDone)} for log in training.values())
        for optimizer in sorted(set.intersection(*each)):
            yield key, training, optimizer


@dataclass(frozen=True)
class _Taken:
    """What a rank had done when it took a step: backwards for this optimizer, and steps of all
    optimizers."""

    backwards: int
    steps: int
    event: StepDone


def _taken(rank: Rank, optimizer: int) -> dict[int, _Taken]:
    table: dict[int, _Taken] = {}
    backwards = steps = 0
    for event in sorted(rank.of(StepDone), key=lambda e: e.at):
        steps += event.count
        if event.optimizer == optimizer:
            backwards += event.backwards
            table[event.step] = _Taken(backwards, steps, event)
    return table


def _first(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], optimizer: int
) -> UnevenBackwards | None:
    tables = {r: _taken(log.rank, optimizer) for r, log in logs.items()}
    common = sorted(set.intersection(*(set(table) for table in tables.values())))
    spans: list[tuple[int, int]] = []  # the step before, and the step
    for before, step in pairwise([-1, *common]):
        ran = {r: _ran(table, before, step) for r, table in tables.items()}
        if len({*ran.values()}) > 1:
            spans.append((before, step))
    if not spans:
        return None
    before, step = spans[0]
    backwards = {r: _ran(table, before, step) for r, table in tables.items()}
    steps = {table[step].steps for table in tables.values()}
    earlier = {_made_in(logs[r], t[before].steps if before >= 0 else 0) for r, t in tables.items()}
    calls = {r: _made_in(logs[r], table[step].steps) for r, table in tables.items()}
    # The ranks took the same turns of optimizers, and their calls were matched up to there.
    if len(steps) > 1 or len(earlier) > 1 or -1 in earlier or -1 in calls.values():
        return None
    each = _each(backwards, calls)
    more = max(backwards, key=lambda r: backwards[r])
    begin = min(calls.values())
    # The others make later what these ranks did in the step.
    if not each or not all(log.issued > begin for log in logs.values()):
        return None
    extra = [
        made
        for index in range(begin, min(calls[more], begin + LOOKED_AT))
        if (made := known.recorded(logs[more], index)) is not None
    ]
    own = [m for m in extra if m.site and not m.site.thread and not m.site.shadows]
    # DDP's own are judged by the gradients that it averages.
    if not own or len(own) < len(extra) or any(m.signature.op.startswith("DDP") for m in own):
        return None
    event = tables[more][step].event
    return UnevenBackwards(
        key=key,
        ranks=tuple(log.rank for log in logs.values()),
        optimizer=optimizer,
        step=before + 1,
        last=spans[-1][1],
        count=len(spans),
        backwards=backwards,
        calls=calls,
        each=each,
        made=own[0],
        loop=_loop(own, each, *(log.rank for log in logs.values())),
        step_site=event.site,
        at=logs[more].rank.wall(event.at),
    )


def _ran(table: dict[int, _Taken], before: int, step: int) -> int:
    return table[step].backwards - (table[before].backwards if before >= 0 else 0)


def _made_in(log: GroupCalls, steps: int) -> int:
    """How many calls a rank made before it had taken so many steps; -1 where that is not known."""
    made = 0
    for segment in log.segments:
        if segment.step < 0 and segment.first:
            return -1
        if segment.step >= steps:
            break
        rounds = segment.repeat
        if segment.every > 0:
            rounds = min(rounds, (steps - 1 - segment.step) // segment.every + 1)
        made = segment.first + rounds * len(segment.codes)
    return made


def _each(backwards: dict[int, int], calls: dict[int, int]) -> int:
    """How many calls a backward makes, if the calls that ranks made more are all of backwards that
    they ran more; 0 if they are not."""
    sides = sorted((number, calls[rank]) for rank, number in backwards.items())
    found: set[tuple[int, int]] = set()
    for (few, made), (many, more) in pairwise(sides):
        if few == many and made != more:
            return 0
        if few != many:
            found.add(divmod(more - made, many - few))
    each, rest = found.pop() if len(found) == 1 else (0, 0)
    return each if each > 0 and not rest else 0


def _loop(calls: list[CallRecord], each: int, *ranks: Rank) -> Location | None:
    """The innermost loop around all of these calls that may have other numbers of rounds on the
    ranks; or else the innermost.

    Not the one that makes all calls of a backward by one line: it runs over the gradients.
    """
    every: list[dict[Key, tuple[Location, int]]] = [
        {key: (head, depth) for key, head, depth, _ in loops_around(made.rank, made.site)}
        for made in calls
    ]
    around = [one for key, one in every[0].items() if all(key in found for found in every)]
    own = not any(made.site and made.site.internal for made in calls)
    one_line = each > 1 and own and len({made.location for made in calls}) == 1
    heads = [head for n, (head, depth) in enumerate(around) if n or depth or not one_line]
    return next((head for head in heads if uneven(head, *ranks)), next(iter(heads), None))
