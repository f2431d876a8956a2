"""What checks declare: what has to be on record for a judgement, and which findings of other checks
follow from theirs."""

from __future__ import annotations

import math

from ..events import Event
from ..run import Run
from .findings import Condition as Condition
from .findings import Effect as Effect
from .findings import Finding, Requirement, Severity

WAITING = ("rank-missing", "rank-exited-early", "stall")
STOPPED = (*WAITING, "rank-died", "first-failure")
CALLS = (
    "collective-mismatch", "collective-shape-mismatch", "group-creation-mismatch", "data-stall"
)  # fmt: skip
COPIES_DIFFER = ("gradient-drift", "parameter-drift", "buffer-drift", "optimizer-state-drift")
NOT_AVERAGED = ("gradient-drift", "parameter-drift", "unsynced-step")
"""Checks whose findings often have one cause."""

AROUND_S = 1.0
"""Seconds by which the record of a failure may precede that of its cause."""


def seen(*events: type[Event], otherwise: str) -> Requirement:
    """That a rank recorded one of these events; `otherwise` is the reason where none did."""
    return lambda run: None if any(map(run.any, events)) else otherwise


def unless(requirement: Requirement, *events: type[Event]) -> Requirement:
    """A requirement that does not matter once a rank recorded one of these events."""
    return lambda run: None if any(map(run.any, events)) else requirement(run)


def several_records(run: Run) -> str | None:
    """For checks that compare what ranks recorded."""
    return None if len(run.ranks) > 1 else "only one rank left a record"


def several_ranks(run: Run) -> str | None:
    """For checks that compare ranks."""
    return None if run.world_size > 1 else "one rank only"


def _share(mine: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return not set(mine).isdisjoint(others)


class When:
    """Conditions that effects of several checks have. What is not known (steps, optimizers) does
    not speak against one finding following from the other."""

    IS_ERROR = Condition(
        "if the cause is an error", lambda mine, _: mine.severity is Severity.ERROR
    )
    SAME_LINE = Condition("at the same line", lambda mine, other: other.location == mine.location)
    SAME_RANKS = Condition("on the same ranks", lambda mine, other: {*other.ranks} == {*mine.ranks})
    SHARED_RANK = Condition(
        "on a rank of the cause", lambda mine, other: _share(mine.ranks, other.ranks)
    )
    OTHER_RANKS = Condition(
        "on other ranks", lambda mine, other: not _share(mine.ranks, other.ranks)
    )
    WITHIN_RANKS = Condition(
        "on no ranks but the cause's", lambda mine, other: {*other.ranks} <= {*mine.ranks}
    )
    FEWER_RANKS = Condition(
        "on some of the cause's ranks", lambda mine, other: {*other.ranks} < {*mine.ranks}
    )
    SHARED_SUBJECT = Condition(
        "about the same", lambda mine, other: _share(mine.subjects, other.subjects)
    )
    SAME_OPTIMIZER = Condition(
        "of the same optimizer",
        lambda mine, other: (
            not (mine.optimizers and other.optimizers) or _share(mine.optimizers, other.optimizers)
        ),
    )
    NOT_BEFORE = Condition("not before the cause", lambda mine, other: other.at >= mine.at)
    SINCE = Condition(
        "not clearly before the cause",
        lambda mine, other: other.at == 0.0 or other.at >= mine.at - AROUND_S,
    )
    STEP_NOT_BEFORE = Condition(
        "from the cause's first step on", lambda mine, other: _steps_later(mine, other) >= 0
    )
    STEP_AFTER = Condition(
        "after the cause's first step", lambda mine, other: _steps_later(mine, other) > 0
    )

    @staticmethod
    def about(subject: str) -> Condition:
        """The other finding names this among its subjects."""
        return Condition(f"about {subject}", lambda _, other: subject in other.subjects)


def _steps_later(mine: Finding, other: Finding) -> float:
    """By how many steps `other` is seen after `mine`; infinite where that is not known."""
    if mine.steps is None or other.steps is None:
        return math.inf
    return other.steps.first - mine.steps.first
