"""Loads of weights and of optimizer and scheduler state, and the ranks that make them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from ...events import Loaded
from ...report.declarations import When
from ...report.findings import Condition, Effect, Finding, Related
from ...run import listed, ranks_do
from ..calls.guards import Guard, guard
from ..models.wrap_options import WrapOptions
from ..rank_differences import LOAD_ALL, ONLY_SOME, extra_by_line
from .causes import Cause
from .divergence_window import EVER, own_step, window
from .group_findings import LOADED_ONLY_ON
from .replicas import Divergence, Replicas

LOAD_ON_SOME = "load-on-some-ranks"
UNEQUAL_LOADS = "unequal-loads"
NOT_A_COPY = "restored-from-no-copy"

RULES = {
    LOAD_ON_SOME: "some ranks load weights or state that the others do not load",
    NOT_A_COPY: "some ranks load other weights for a time, and what they load back is no copy",
    UNEQUAL_LOADS: "every rank loads weights or state, and what they load differs",
}

THINGS = {
    "weights": "weights after the wrap",
    "optimizer": "the optimizer's state",
    "scheduler": "the scheduler's state",
}
"""What may be loaded, and how a report calls it."""

LOADED_TOO = "also_loaded"
"""Evidence: what else the same ranks load, a list of keys of `THINGS`."""


@dataclass(frozen=True)
class LoadedOnSome:
    """A load that only these ranks make, or that they make more often.

    Attributes:
        event: the last one, on the first of these ranks.
        others: whether the other ranks load something, too.
        here: whether they do so at the same line, less often.
    """

    ranks: tuple[int, ...]
    event: Loaded
    others: bool
    here: bool


class Loads:
    """The loads of one thing before a moment, by rank.

    Args:
        what: a key of `THINGS`.
        until: seconds on the run's clock.
        steps: before one of these steps of the model's optimizer.
    """

    def __init__(self, group: Replicas, what: str, until: float, steps: range = EVER) -> None:
        self.group, self.what, self.until, self.steps = group, what, until, steps
        every = {
            n: [e for e in m.loads(what) if steps == EVER or own_step(m, e.step) in steps]
            for n, m in group.members.items()
        }
        self.made = {
            n: [e for e in mine if group.members[n].rank.wall(e.at) <= until]
            for n, mine in every.items()
        }
        last = max((e.step for mine in self.made.values() for e in mine), default=-1)
        # Up to the step of the last one: a slower rank may load later.
        self.by_step = {n: [e for e in mine if e.step <= last] for n, mine in every.items()}
        self.ranks = tuple(sorted(n for n, mine in self.made.items() if mine))
        self.everybody = len(self.ranks) == len(group.members)

    def _line(self, number: int, event: Loaded) -> str:
        return str(self.group.members[number].rank.location(event.site))

    def _thing(self, what: str) -> str:
        wrapped = self.group.any.model >= 0
        return THINGS[what] if wrapped else THINGS[what].removesuffix(" after the wrap")

    @cached_property
    def on_some(self) -> LoadedOnSome | None:
        """The last load that some ranks make and the others do not, or less often."""
        extra, also = (
            extra_by_line({n: [self._line(n, e) for e in mine] for n, mine in rows.items()})
            for rows in (self.made, self.by_step)
        )
        last = {
            line: [e for e in self.by_step[ranks[0]] if self._line(ranks[0], e) == line][-1]
            for line, ranks in also.items()
            if extra.get(line) == ranks
        }
        if not last:
            return None
        line = max(last, key=lambda each: last[each].at)
        rest = [(n, e) for n, mine in self.by_step.items() if n not in also[line] for e in mine]
        here = any(self._line(n, e) == line for n, e in rest)
        return LoadedOnSome(also[line], last[line], bool(rest), here)

    def cause(self) -> Cause | None:
        """Some ranks loaded after the wrap and others did not, or not at the same line; None where
        no rank loaded."""
        if self.on_some is not None:
            return self._cause_on_some(self.on_some)
        ranks = tuple(sorted(n for n, mine in self.by_step.items() if mine))
        if not ranks:
            return None
        last, thing = self.by_step[ranks[0]][-1], self._thing(self.what)
        everybody = len(ranks) == len(self.group.members)
        rank = self.group.members[ranks[0]].rank
        if everybody and last.update and (found := guard(rank, last.update, lacks=False)):
            return self._from_a_copy(ranks, last, found)
        return Cause(
            UNEQUAL_LOADS if everybody else LOAD_ON_SOME,
            text=f"every rank loads {thing}, but not the same values"
            if everybody
            else f"{ranks_do(ranks, 'load')} {thing}, the other ranks do not",
            fix=self._fix(ranks[0], last),
            label="loads different values on different ranks" if everybody else ONLY_SOME,
            location=self.group.members[ranks[0]].rank.location(last.site),
            ranks=ranks,
            evidence={} if everybody else {LOADED_ONLY_ON: list(ranks)},
        )

    def _from_a_copy(self, ranks: tuple[int, ...], last: Loaded, found: Guard) -> Cause:
        """Every rank loads another module's weights, which not every rank updates."""
        rank = self.group.members[ranks[0]].rank
        line = rank.location(last.update[0].site)
        updates = (Related("updates what is loaded, not on every rank", line),) if line else ()
        return Cause(
            UNEQUAL_LOADS,
            text=f"every rank loads {self._thing(self.what)}, but not the same values: they come "
            f"from a copy that is updated {found.text}, and so not on every rank",
            fix=f"{found.fix(at_the_line=False)}, or send the copy before it is loaded: "
            "`for t in copy.state_dict().values(): dist.broadcast(t, src=0)`",
            label="loads different values on different ranks",
            location=rank.location(last.site),
            ranks=ranks,
            related=(*updates, found.related),
        )

    def _from_no_copy(self, some: LoadedOnSome) -> Cause | None:
        """The last load is of the model's own tensors, and follows another one."""
        member, number = self.group.members[some.ranks[0]], some.ranks[0]
        earlier = takewhile(lambda e: e is not some.event, self.by_step[number])
        before = [e for e in earlier if not e.own]
        spot = member.rank.location(before[-1].site) if before else None
        if not some.event.own or spot is None:
            return None
        return Cause(
            NOT_A_COPY,
            text=f"{ranks_do(some.ranks, 'load')} other weights for a time. What is loaded back "
            "afterwards are the model's own tensors, so that nothing is restored: `state_dict()` "
            "gives references, not copies",
            fix="keep a copy: `saved = copy.deepcopy(model.state_dict())` before the other weights "
            "are loaded; or load those into a copy of the model",
            label="loads the model's own tensors: nothing changes",
            location=member.rank.location(some.event.site),
            ranks=some.ranks,
            related=(Related("loads other weights", spot),),
            evidence={LOADED_ONLY_ON: list(some.ranks)},
        )

    def _cause_on_some(self, some: LoadedOnSome) -> Cause:
        if (cause := self._from_no_copy(some)) is not None:
            return cause
        ranks = some.ranks
        also_loaded = {
            more: line
            for more in THINGS
            if more not in (self.what, "weights") and (line := self._with_it(more, ranks))
        }
        thing = listed([self._thing(each) for each in (self.what, *also_loaded)])
        found = None if some.here else guard(self.group.members[ranks[0]].rank, some.event.places)
        facts: dict[str, object] = {LOADED_ONLY_ON: list(ranks)}
        if also_loaded:
            facts[LOADED_TOO] = list(also_loaded)
        if some.here:
            text = f"{ranks_do(ranks, 'load')} {thing} more often than the other ranks"
        else:
            place = " at this line" * some.others
            under = f" {found.text}" if found else ""
            text = f"{ranks_do(ranks, 'load')} {thing}{place}{under}, the other ranks do not"
        return Cause(
            LOAD_ON_SOME,
            text=text,
            fix="load the same on every rank"
            if some.others
            else self._fix(ranks[0], some.event, bool(also_loaded), found),
            label="some ranks run this line more often" if some.here else ONLY_SOME,
            location=self.group.members[ranks[0]].rank.location(some.event.site),
            ranks=ranks,
            related=(*also_loaded.values(), *([found.related] if found else [])),
            evidence=facts,
        )

    def _with_it(self, what: str, ranks: tuple[int, ...]) -> Related | None:
        """The line at which the same ranks, and only they, also load `what`."""
        other = Loads(self.group, what, self.until, self.steps)
        if other.ranks == ranks:
            event = other.made[ranks[0]][-1]
        elif other.on_some is not None and other.on_some.ranks == ranks:
            event = other.on_some.event  # a framework may load it on all ranks, when it wraps
        else:
            return None
        spot = self.group.members[ranks[0]].rank.location(event.site)
        return Related(f"loads {self._thing(what)}", spot) if spot else None

    def _fix(
        self, number: int, event: Loaded, also_loaded: bool = False, under: Guard | None = None
    ) -> str:
        there = under.fix(keep=True) if under else ""
        everything = f"{LOAD_ALL}; {there}" if there else LOAD_ALL
        if self.what != "weights":
            return (
                f"{everything}; if only one rank has the file, load it there and send it: "
                "`box = [state]; dist.broadcast_object_list(box, src=0); state = box[0]`"
            )
        if also_loaded:
            return everything
        fix = f"{there}; or " if there else "load the same weights on every rank, or "
        if own_step(self.group.members[number], event.step) > 0:  # the training had begun
            fix += "load them " * bool(under)
            return fix + "into a copy of the model if only one rank needs them (to evaluate)"
        if self.group.any.model < 0:
            return (
                f"{fix}broadcast the parameters afterwards: `for p in model.parameters(): "
                "dist.broadcast(p.data, src=0)`"
            )
        wrapping = WrapOptions(self.group.members[number].wrapped).wrapping
        fix += "load the weights " * bool(under)
        return f"{fix}before {wrapping}, which broadcasts rank 0's parameters"


def loaded(group: Replicas, what: str, found: Divergence) -> Cause | None:
    """Loads that explain a divergence, since the copies were last equal."""
    return Loads(group, what, found.at, window(group, found)).cause()


def weights(group: Replicas, found: Divergence) -> Cause | None:
    """Loads of weights after the wrap."""
    return loaded(group, "weights", found)


def each_its_own(group: Replicas, until: float) -> bool:
    """Whether all ranks had loaded weights by `until`, none more often than another: they may
    evaluate several checkpoints at a time, one on each rank."""
    loads = Loads(group, "weights", until)
    return loads.everybody and loads.on_some is None


def _of_the_same(one: Finding, other: Finding) -> bool:
    """Whether both findings follow from loads of the same ranks alone."""
    ranks = one.evidence.get(LOADED_ONLY_ON)
    return ranks is not None and ranks == other.evidence.get(LOADED_ONLY_ON)


SAME_LOADS = Condition("of what the same ranks alone loaded", _of_the_same)
OTHER_LOADS = Condition(
    "unless both come from what the same ranks alone loaded",
    lambda mine, other: not _of_the_same(mine, other),
)


def _left_by_them(one: Finding, other: Finding) -> bool:
    """Whether the ranks that alone loaded left a loop, and no statement in it says why."""
    ranks, head = one.evidence.get(LOADED_ONLY_ON), other.location
    ended = head is not None and head.source.startswith(("for ", "while "))
    return isinstance(ranks, list) and ended and {*other.ranks} == {*ranks}


RESUMED_ALONE = (
    Effect(
        ("sampler-seed-skew",),
        of=(LOAD_ON_SOME,),
        rules=("different-epochs",),
        when=(When.IS_ERROR,),
    ),
    Effect(
        ("rank-exited-early", "collective-mismatch"),
        of=(LOAD_ON_SOME,),
        rules=("loop-exit",),
        when=(
            When.IS_ERROR,
            Condition("of a loop that those leave early who alone loaded", _left_by_them),
        ),
    ),
    Effect(
        ("rank-exited-early", "collective-mismatch"),
        of=(LOAD_ON_SOME,),
        rules=("resumed-on-some-ranks",),
        when=(When.IS_ERROR, When.SAME_RANKS),
    ),
)
"""What else differs where only some ranks resume from a checkpoint: the epochs or steps left."""


def equal_again(group: Replicas, found: Divergence) -> bool:
    """Whether parameters that differed were equal again later, and not because they were loaded:
    the program averages them itself (local SGD)."""
    return found.healed >= 0 and not reloads(group, "weights", found.at)


def reloads(group: Replicas, what: str, after: float) -> bool:
    """Whether anything was loaded later."""
    return any(m.rank.wall(e.at) > after for m in group.members.values() for e in m.loads(what))
