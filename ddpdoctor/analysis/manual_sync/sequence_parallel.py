"""Copies that compute one batch together through `all_to_all` (sequence parallelism), and whose
gradients, each of a part of that batch, are never reduced."""

from __future__ import annotations

from ...events import Unwrapped, UnwrappedState
from ...events.pack import unpack
from ...run import Rank, Run

NOTHING = (0, 1)
"""Digests of no tensor, and of zeros."""

LOOKS_AT_LEAST = 4


def apart(run: Run, optimizer: int) -> tuple[dict[Rank, Unwrapped], list[int]] | None:
    """The model that all ranks train with this optimizer and no other, and the steps compared; None
    where its copies may be meant to differ.

    Experts and tables that are divided among the ranks have other parameters next to them, which
    are wrapped or synchronised, or come right after the first `all_to_all`, which then has no
    backward.
    """
    events = {rank: rank.of(Unwrapped) for rank in run.ranks.values()}
    alike = {rank: reported[0] for rank, reported in events.items() if len(reported) == 1}
    every = list(alike.values())
    if len(alike) < max(2, run.world_size) or any(
        e.parameters != every[0].parameters for e in every
    ):
        return None
    if any(not e.kind or e.wrapped or e.optimizer != optimizer for e in every):
        return None
    rows = [{s.step: s for s in r.of(UnwrappedState) if s.each and not s.last} for r in alike]
    steps = sorted(set.intersection(*(set(states) for states in rows)))
    if len(steps) < LOOKS_AT_LEAST or steps[:2] != [0, 1]:
        return None
    looks = [[states[step] for states in rows] for step in steps]
    count = len(every[0].parameters)
    if all(_swap(states) and _nothing_else(states) for states in rows) and all(
        _own_gradients(look, count) and (len({s.parameters for s in look}) == 1) is (step == 0)
        for step, look in zip(steps, looks, strict=True)
    ):
        return alike, steps
    return None


def _swap(states: dict[int, UnwrappedState]) -> bool:
    """Whether every `all_to_all` between the first two looks has a backward: then also what comes
    before the first of them is trained."""
    before, after = (states[step].swaps or (0, 0) for step in (0, 1))
    there, back = (b - a for a, b in zip(before, after, strict=True))
    return there == back > 0


def _nothing_else(states: dict[int, UnwrappedState]) -> bool:
    """Whether no collective carried gradients between backward and step, nor any parameters."""
    first = states[0]
    return all(
        s.exchanged == "all-to-all" and s.averaged == first.averaged
        and not (s.handed or s.other or s.late or s.shared or s.completed or s.inside or s.running)
        for s in states.values()
    )  # fmt: skip


def _own_gradients(look: list[UnwrappedState], count: int) -> bool:
    """Whether no gradient is equal on two ranks."""
    rows = [unpack(s.each)[:count] for s in look]
    return all(
        len(set(column)) == len(look) or set(column) <= set(NOTHING)
        for column in zip(*rows, strict=True)
    )
