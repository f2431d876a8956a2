"""Between which steps copies began to differ: the cause lies in this window."""

from __future__ import annotations

from ...events import Digests, StepDone
from ...events.drift import UNHELD
from .replica import Member
from .replicas import Divergence, Replicas, by_step

EVER = range(1 << 62)
"""All steps."""


def window(group: Replicas, found: Divergence) -> range:
    """The optimizer steps before which the copies may have begun to differ: after the last one
    before which they were equal, up to the one before which they are seen to differ.

    Copies that differ stay different. So all were equal at a step if each tensor was at this step
    or a later one: not every tensor is compared at every step.
    """
    if group.any.optimizer == UNHELD:
        return EVER  # there are no steps to tell it by
    last = _seen(group, found)
    tables = [by_step(m, found.kind, found.total) for m in group.members.values()]
    unseen = set(range(found.total))
    for step in sorted(set.intersection(*(set(t) for t in tables)), reverse=True):
        if step < last:
            looked = set.intersection(*(set(table[step][0]) for table in tables))
            unseen -= looked
            if not unseen:
                return range(step + 1, last + 1)
    return range(last + 1)


def own_step(member: Member, total: int) -> int:
    """How many steps the model's own optimizer has taken after `total` steps of all optimizers."""
    done = others = 0
    for event in member.rank.of(StepDone):
        count = min(event.count, total - done)
        done += count
        others += count * (event.optimizer != member.optimizer)
    return total - others


def _seen(group: Replicas, found: Divergence) -> int:
    """The first step after the moment at which the copies are first seen to differ."""
    if found.point == "step":
        return found.first
    evaluated = [
        own_step(member, event.step)
        for member in group.members.values()
        for event in member.rank.of(Digests)
        if (event.model, event.kind, event.point) == (member.model, found.kind, found.point)
        and found.first in event.keys
        and event.step >= 0
    ]
    if found.point == "end" or not evaluated:
        return max(m.last_step for m in group.members.values()) + 1
    return max(evaluated)
