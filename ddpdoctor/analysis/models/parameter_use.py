"""Which parameters each rank used in which backward, and where ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...events import UnusedParameters
from ...events.model import ALWAYS_EXAMINED, examined
from ...report.findings import Steps
from ...run import Rank, Run
from ...run.steps import recorded_total
from .wrapped_models import sets_of, skipped_of, steps_of, use_of, wrap_of


def first_unused(rank: Rank, model: int) -> UnusedParameters | None:
    """The first record of a backward with unused parameters."""
    return next((e for e in sets_of(rank, model) if e.indices), None)


def state_at(rank: Rank, model: int, backward: int) -> UnusedParameters | None:
    """The set of unused parameters that applied at a backward: it is recorded when it changes."""
    known = [e for e in sets_of(rank, model) if e.backward <= backward]
    return known[-1] if known else None


def used_all(rank: Rank, model: int, event: UnusedParameters) -> bool:
    """Whether a rank is known to have used every parameter in the backward of another rank's
    record `event`."""
    state = state_at(rank, model, event.backward)
    if state is None:
        # It may hang in its first backward, but its forward is on record.
        forward = [s for s in skipped_of(rank, model) if s.backward <= event.backward]
        return bool(forward) and not forward[-1].names and not sets_of(rank, model)
    if state.indices:
        return False
    if state.backward == event.backward:
        return True
    use = use_of(rank, model)
    total = event.total if event.total >= 0 else event.step
    if use is not None and use.backwards >= event.backward:
        # Every rank examines the same backwards, and this one found nothing unused in any.
        never = not use.unused and not event.by_torch
        return never or event.backward <= ALWAYS_EXAMINED or recorded_total(rank) <= total
    # It never left that backward: DDP waits for other ranks only once all gradients are ready.
    return recorded_total(rank) <= total


def differing(run: Run, model: int) -> tuple[Rank, UnusedParameters, dict[int, set[int]]] | None:
    """The first backward in which ranks used different parameters, None where there is none.

    Returns:
        A rank with unused parameters, its record, and by rank the positions of unused parameters
        (only ranks of which that is known).
    """
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


def steps_seen(
    unused: Iterable[tuple[Rank, Iterable[int]]], model: int, begin: int = 0
) -> Steps | None:
    """The examined steps in which ranks did not use some parameters of the model.

    Args:
        unused: ranks, each with the positions that have to be among the unused ones.
        model: number of the model; begin: the first step that counts.
    """
    looks = [look for rank, wanted in unused for look in _looks(rank, model, set(wanted))]
    looks = [look for look in looks if look[0] >= begin]
    found = Steps.of(step for step, left_out in looks if left_out)
    if found is None:
        return None
    since = {step for step, _ in looks if step >= found.first}
    whole = len(since) > max(since) - found.first
    return found if whole else Steps(found.first, found.last, found.count, len(since))


def seen_by(rank: Rank, model: int, event: UnusedParameters) -> dict[str, int]:
    """The last examined step before a record, as evidence, if others lie between: the set may have
    changed in one of these."""
    before = [step for step, _ in _looks(rank, model, set()) if step < event.step]
    gap = bool(before) and before[-1] < event.step - 1
    return {"last step examined before": before[-1]} if gap else {}


def _looks(rank: Rank, model: int, wanted: set[int]) -> Iterator[tuple[int, bool]]:
    """The examined steps, and whether the set of unused parameters then had all of `wanted` and was
    not empty."""
    changes, wrapped = sets_of(rank, model), wrap_of(rank, model)
    expected = [p for p in wrapped.parameters if p.trainable and not p.ignored] if wrapped else []
    last = max([steps_of(rank, model) - 1, *(c.step for c in changes)])
    for change, after in zip(changes, [*changes[1:], None], strict=False):
        each = max(1, change.backward // (change.step + 1))  # backwards in a step
        for step in range(change.step, after.step if after else last + 1):
            made = change.backward - 1 + (step - change.step) * each
            if step == change.step or any(
                examined(n, len(expected)) for n in range(made, made + each)
            ):
                yield step, bool(change.indices) and wanted.issubset(change.indices)
