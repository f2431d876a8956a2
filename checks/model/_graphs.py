"""Which parameters each rank used in which backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.events import UnusedParameters
from ddpdoctor.run import Rank, Run

from ._models import sets_of, skipped_of, steps_of, steps_taken, use_of

ALWAYS_EXAMINED = 8
"""The first backwards of a model are examined on every rank."""


def first_unused(rank: Rank, model: int) -> UnusedParameters | None:
    return next((e for e in sets_of(rank, model) if e.indices), None)


def state_at(rank: Rank, model: int, backward: int) -> UnusedParameters | None:
    """The set that held at a backward, as far as the rank recorded it."""
    known = [e for e in sets_of(rank, model) if e.backward <= backward]
    return known[-1] if known else None


def used_all(rank: Rank, model: int, event: UnusedParameters) -> bool:
    """Whether a rank certainly used every parameter in the backward of another rank's event."""
    state = state_at(rank, model, event.backward)
    if state is None:
        # It may hang in its first backward, of which the forward at least is on record.
        forward = [s for s in skipped_of(rank, model) if s.backward <= event.backward]
        return bool(forward) and not forward[-1].names and not sets_of(rank, model)
    if state.indices:
        return False
    if state.backward == event.backward:
        return True
    use = use_of(rank, model)
    total = event.total if event.total >= 0 else event.step
    if use is not None and use.backwards >= event.backward:
        # Which of the later ones are examined is the same on every rank: this one found nothing
        # unused in any.
        never = not use.unused and not event.by_torch
        return never or event.backward <= ALWAYS_EXAMINED or steps_taken(rank) <= total
    # It never came out of that backward, and DDP waits only where all gradients are ready.
    return steps_taken(rank) <= total


def differing(run: Run, model: int) -> tuple[Rank, UnusedParameters, dict[int, set[int]]] | None:
    """The first backward in which ranks used different parameters: a rank that left some out, its
    record, and what every rank that can be told left out."""
    events = sorted(
        ((e.backward, r.rank, r, e) for r in run.ranks.values() for e in sets_of(r, model)),
        key=lambda row: row[:2],
    )
    for _, _, rank, event in events:
        if not event.indices:
            continue
        left: dict[int, set[int]] = {rank.rank: set(event.indices)}
        for other in run.ranks.values():
            if other is rank:
                continue
            state = state_at(other, model, event.backward)
            if state is not None and state.indices and state.backward == event.backward:
                left[other.rank] = set(state.indices)
            elif used_all(other, model, event):
                left[other.rank] = set()
        if len({frozenset(s) for s in left.values()}) > 1:
            return rank, event, left
    return None


def steps_with(rank: Rank, model: int, unused: Iterable[int] = ()) -> Iterator[int]:
    """Steps in which parameters of the model were unused, `unused` among them if given (the set is
    recorded when it changes)."""
    wanted = set(unused)
    changes = sets_of(rank, model)
    last = max(steps_of(rank, model) - 1, *(c.step for c in changes), 0)
    for change, after in zip(changes, [*changes[1:], None], strict=False):
        if change.indices and wanted.issubset(change.indices):
            yield from range(change.step, after.step if after else last + 1)
