"""Options of an optimizer's groups, rank by rank and step by step, and where they differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from ...events import Hyperparameters, OptimizerSeen, OptionsRead, Place, SchedulerStep
from ...events.amp import FIRST_TOLD, told_at
from ...events.timing import LONGEST_LIGHT
from ...report.findings import Related
from ...run import Location, Rank, ranks_do, ranks_text, some
from ..calls.guards import guard
from ..rank_differences import same_value
from .causes import Cause
from .replica import Member
from .replicas import Replicas
from .thresholds import LACKS_AT_MOST, SCHEDULE

Value = float | bool | str
Groups = tuple[dict[str, Value], ...]

SCALES_ITSELF = ("ada", "rmsprop", "rprop", "lamb", "lars", "lion", "muon", "shampoo", "soap")
"""Parts of the names of optimizers whose updates hardly change with a constant factor of all
gradients: they divide each by its own size."""

SET_ON_SOME = "set-on-some-ranks"
SET_HERE = "set to different values on different ranks"


class Table(dict[int, Groups]):
    """The options of one rank by the step from which they hold.

    Attributes:
        exact: steps from which new options hold, where they were read just before, too.
        unread: steps at which it is not known which of two options held: light ones do not read
            them, and ranks need not look at the same steps.
    """

    def __init__(self, events: Iterable[Hyperparameters] = (), read_until: float = inf) -> None:
        super().__init__()
        self.unread: list[tuple[float, float]] = []
        self.exact: set[int] = set()
        last = 0
        for event in events:
            if event.read == event.step - 1:
                self.exact.add(event.step)
            if last <= event.read < event.step - 1:
                self.unread.append((event.read + 1, event.step - 1))
            self[event.step] = event.groups
            last = event.step
        if events:
            self.unread.append((max(last, read_until) + 1, inf))

    def knows(self, step: int) -> bool:
        """Whether it is known which options held at a step."""
        return not any(begin <= step <= end for begin, end in self.unread)


def by_step(rank: Rank, optimizer: int) -> Table:
    """The options by the step from which they hold."""
    events = [e for e in rank.of(Hyperparameters) if e.optimizer == optimizer]
    read = max((e.step for e in rank.of(OptionsRead) if e.optimizer == optimizer), default=None)
    if read is None:
        # It was killed, perhaps in light steps.
        read = max(FIRST_TOLD, rank.steps_of(optimizer) - LONGEST_LIGHT)
    return Table(events, read)


def at(table: Mapping[int, Groups], step: int) -> Groups:
    """The options that hold at a step."""
    return table[max(s for s in table if s <= step)]


def skewed(tables: dict[int, Table], last: int) -> list[int]:
    """The steps up to `last` at which any rank recorded a change and the values are not equal, as
    far as they are known of all ranks."""
    reported = sorted(
        {s for t in tables.values() for s in t if (told_at(s) or s in t.exact) and s <= last}
    )
    begun = [s for s in reported if all(min(t, default=1 << 60) <= s for t in tables.values())]
    found = []
    for step in begun:
        if not all(table.knows(step) for table in tables.values()):
            continue
        now = {n: at(table, step) for n, table in tables.items()}
        if len({len(groups) for groups in now.values()}) > 1:
            continue
        values = list(settled(now).values())
        if any(v != values[0] for v in values):
            found.append(step)
    return found


def ahead(tables: Mapping[int, Mapping[int, Groups]], option: str, index: int) -> tuple[int, ...]:
    """The ranks that reach the last common value of an option first, where all ranks set the same
    values in the same order and only at different steps.

    Empty where the values differ, or there are fewer than `SCHEDULE` common ones.
    """
    series = {n: list(_series(table, option, index)) for n, table in tables.items()}
    common = min(len(changes) for changes in series.values())
    first = next(iter(series.values()))[:common]
    same = all(
        same_value(value, known)
        for changes in series.values()
        for (_, value), (_, known) in zip(changes, first, strict=False)
    )
    if common < SCHEDULE or not same:
        return ()
    when = {n: changes[common - 1][0] for n, changes in series.items()}
    return tuple(n for n, step in when.items() if step == min(when.values()) < max(when.values()))


def omitting(
    tables: Mapping[int, Mapping[int, Groups]], option: str, index: int
) -> tuple[int, ...]:
    """The ranks that omit a few consecutive values of an option that the others set, and set all
    later ones correspondingly sooner. Empty where the values differ otherwise."""
    series = {n: [v for _, v in _series(table, option, index)] for n, table in tables.items()}
    for whole in series.values():
        lacks = {n: _lacks(values, whole) for n, values in series.items()}
        if all(count is not None for count in lacks.values()) and any(lacks.values()):
            return tuple(n for n, count in lacks.items() if count)
    return ()


def _lacks(values: list[Value], whole: list[Value]) -> int | None:
    """How many values of `whole` are missing from `values`, in one place; None where the values
    differ otherwise."""
    pairs = enumerate(zip(values, whole, strict=False))
    begin = next((n for n, (a, b) in pairs if not same_value(a, b)), None)
    if begin is None:
        return 0
    for count in range(1, LACKS_AT_MOST + 1):
        rest = list(zip(values[begin:], whole[begin + count :], strict=False))
        if len(rest) >= SCHEDULE and all(same_value(a, b) for a, b in rest):
            return count
    return None


def _series(table: Mapping[int, Groups], option: str, index: int) -> Iterator[tuple[int, Value]]:
    """The consecutive values of an option, each with the step from which it holds."""
    before: Value | None = None
    for step in sorted(table):
        value = table[step][index].get(option) if index < len(table[step]) else None
        if value is not None and value != before:
            yield step, value
            before = value


def settled(values: dict[int, Groups]) -> dict[int, Groups]:
    """The options by rank, with values that differ by rounding only replaced by those of the first
    rank."""
    first = next(iter(values.values()))

    def settle(group: dict[str, Value], known: dict[str, Value]) -> dict[str, Value]:
        return {
            o: known[o] if o in known and same_value(v, known[o]) else v for o, v in group.items()
        }

    return {
        n: tuple(settle(group, known) for group, known in zip(groups, first, strict=True))
        for n, groups in values.items()
    }


def options(values: dict[int, Groups]) -> list[tuple[str, int]]:
    """The options that differ, as (name, parameter group); the learning rate first."""
    tables = list(values.values())
    found = [
        (name, i)
        for i in range(len(tables[0]))
        for name in tables[0][i]
        if len({str(t[i].get(name)) for t in tables}) > 1
    ]
    return sorted(found, key=lambda o: o[0] != "lr")


def spelled(shown: Mapping[int, object]) -> str:
    """`0.1 on ranks 0-2, 0.2 on rank 3`; at most four values."""
    by_value: dict[object, list[int]] = {}
    for number, value in shown.items():
        by_value.setdefault(value, []).append(number)
    parts = [
        f"{v:.9g} on {ranks_text(r)}" if isinstance(v, float) else f"{v} on {ranks_text(r)}"
        for v, r in by_value.items()
    ]
    return some(parts, 4, "values") if len(parts) > 4 else ", ".join(parts)


def set_apart(ranks: Collection[int], members: Collection[int]) -> tuple[str, str]:
    """The cause and the label of a line at which the ranks set options, `ranks` not as most do."""
    if len(ranks) == len(members):
        return "the options are set differently on each rank", SET_HERE
    text = f"{ranks_do(ranks, 'set')} the options to other values than most ranks"
    return text, f"set to another value on {ranks_text(ranks)}"


def set_at(rank: Rank, optimizer: int, option: str, until: int) -> Location | None:
    """The line of the program that set an option, up to a step."""
    for event in _setting(rank, optimizer, option):
        spot = rank.location(event.set_sites[option]) if event.step <= until else None
        if spot is not None:
            return spot
    return None


def set_through(rank: Rank, optimizer: int, option: str) -> tuple[Place, ...]:
    """That line and those of the calls that lead to it, innermost first; empty where the records
    have none."""
    found = (event.set_through.get(option, ()) for event in _setting(rank, optimizer, option))
    return next(found, ())


def _setting(rank: Rank, optimizer: int, option: str) -> Iterator[Hyperparameters]:
    """The records of changes of an option of which the line is known."""
    for event in rank.of(Hyperparameters):
        if event.optimizer == optimizer and option in event.set_sites:
            yield event


def moves(rank: Rank, optimizer: int, option: str) -> bool:
    """Whether a rank ever steps with another value of an option than in its first step."""
    events = [e for e in rank.of(Hyperparameters) if e.optimizer == optimizer]
    return len({tuple(str(g.get(option)) for g in e.groups) for e in events}) > 1


def is_set(rank: Rank, optimizer: int, option: str) -> bool:
    """Whether a rank changes an option after its optimizer is made, as far as is known."""
    known = any(True for _ in _setting(rank, optimizer, option))
    return known or moves(rank, optimizer, option)


@dataclass(frozen=True)
class Skew:
    """Options that differ at a step.

    Attributes:
        option: the first that differs.
        first: the step.
        ranks: those that differ from most.
        values: of all options that differ, by rank, as text.
        early: the ranks that set the same values at earlier steps, where nothing else differs.
    """

    group: Replicas
    option: str
    first: int
    ranks: tuple[int, ...]
    values: dict[int, tuple[str, ...]]
    early: tuple[int, ...]

    @cached_property
    def at(self) -> float:
        """When it was first seen, on the run's clock."""
        return min(m.rank.wall(_time(m, self.first)) for m in self.group.members.values())

    @cached_property
    def calls(self) -> dict[int, list[SchedulerStep]]:
        """By rank, calls of the optimizer's schedulers; only those before its first step where the
        options differ at that step."""
        found = {}
        for number, member in self.group.members.items():
            seen = (e.at for e in member.of(OptimizerSeen))
            before = inf if self.first else next(seen, inf)
            calls = member.rank.of(SchedulerStep)
            of = (-1, member.optimizer)
            found[number] = [c for c in calls if c.optimizer in of and c.at <= before]
        return found

    @property
    def stepping(self) -> list[int]:
        """The ranks that step a scheduler."""
        return [n for n, calls in self.calls.items() if calls]

    @property
    def plateau(self) -> bool:
        """Whether one of the schedulers decides by a metric (`ReduceLROnPlateau`)."""
        return any("Plateau" in c.kind for calls in self.calls.values() for c in calls)

    @property
    def stepped_equally(self) -> bool:
        """Whether all ranks make the same scheduler calls at the same steps."""
        return len({tuple((c.kind, c.step, c.call) for c in m) for m in self.calls.values()}) == 1

    @property
    def set_line(self) -> Location | None:
        """The line of the program that sets the option, on the ranks at fault first."""
        ranks = self.ranks if self.stepping else self.early or self.ranks
        members = (self.group.members[n] for n in (*ranks, *self.group.members))
        spots = (set_at(m.rank, m.optimizer, self.option, self.first) for m in members)
        return next((spot for spot in spots if spot is not None), None)

    def related(self, why: Cause) -> tuple[Related, ...]:
        """Other lines than that of the cause: of the step, too."""
        step = self.group.line(Hyperparameters, why.ranks or self.early or self.ranks)
        if step is None or step == why.location:
            return why.related
        return (*why.related, Related("applied here", step))

    def line_of(self, number: int, call: SchedulerStep) -> Location | None:
        return self.group.members[number].rank.location(call.site)


def _time(member: Member, step: int) -> float:
    events = member.of(Hyperparameters)
    return next((e.at for e in events if e.step >= step), events[-1].at if events else 0.0)


def set_on_some(skew: Skew) -> Cause | None:
    """Some ranks set the option at a line that has a condition on the rank around it, and on the
    others it keeps the value of the first step for good."""
    members = skew.group.members
    for changes in (is_set, moves):
        setting = [n for n, m in members.items() if changes(m.rank, m.optimizer, skew.option)]
        if len(setting) < len(members):
            break
    if not 0 < len(setting) < len(members):
        return None
    one = members[setting[0]]
    places = set_through(one.rank, one.optimizer, skew.option)
    found = guard(one.rank, places)
    line = one.rank.location(places[0].site) if places else None
    if found is None or line is None:
        return None
    lacking = tuple(n for n in members if n not in setting)
    where = "" if found.direct else f" in a function that is called ({found.guarded})"
    return Cause(
        SET_ON_SOME,
        text=f"only {ranks_do(setting, 'set')} {skew.option},{where} {found.text}; on "
        f"{ranks_text(lacking)} it keeps its first value",
        fix=found.fix(),
        label=f"runs on {ranks_text(setting)} only",
        location=line,
        ranks=lacking,
        related=(found.related,),
    )


def scales_itself(kind: str) -> bool:
    """Whether an optimizer of this class takes out a constant factor of all gradients."""
    return any(part in kind.lower() for part in SCALES_ITSELF)


def takes_out_factors(member: Member) -> str:
    """The optimizer of a model where all of its optimizers take out such a factor; else empty."""
    kinds = [e.kind for e in member.rank.of(OptimizerSeen) if member.model in e.models]
    return kinds[0] if kinds and all(map(scales_itself, kinds)) else ""
