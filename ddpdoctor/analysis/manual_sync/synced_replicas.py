"""Copies without a wrapper whose gradients the program makes equal, as replicas: what is asked of
copies of a wrapped model can be asked of them."""

from __future__ import annotations

from collections.abc import Iterator

from ...events import OptimizerSeen, Replica, Unwrapped, Wrapped
from ...run import Rank, Run
from ..replicas.replica import Member
from ..replicas.replicas import Replicas
from .copies import Copies, trained_copies


def averaged_replicas(run: Run) -> Iterator[Replicas]:
    """Those whose gradients the program averages, whatever became of the parameters: their options
    have to be the same, too."""
    for copies in trained_copies(run):
        if copies.kept_equal or equal_gradients(copies):
            yield as_replicas(copies)


def equal_gradients(copies: Copies) -> bool:
    """Whether the program synchronises the gradients, which agree at every look from before the
    first step on, but was not seen to keep the parameters equal that way."""
    exchanged = copies.steady or copies.agreed
    return exchanged and copies.agree_from_start and not copies.kept_equal


def as_replicas(copies: Copies) -> Replicas:
    return Replicas({n: member_of(*pair) for n, pair in copies.members.items()})


def member_of(rank: Rank, event: Unwrapped | OptimizerSeen) -> Member:
    """A rank's copy, described like one with a wrapper."""
    seen = Replica(at=event.at, model=-1, optimizer=event.optimizer, ranks=(), parameters="")
    origin = Wrapped(at=event.at, model=-1, wrapper="", kind=event.kind, group=-1, site=event.site)
    return Member(rank, seen, origin)
