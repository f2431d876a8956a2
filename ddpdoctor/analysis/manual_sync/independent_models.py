"""Ranks that are meant to train independent models: trials of a search (certain), or members of an
ensemble (possible)."""

from __future__ import annotations

from math import isclose

from ...events import Hyperparameters, LoaderSeen, Unwrapped
from ...run import Rank
from .copies import Copies, form, same, states_of, step_of
from .thresholds import MODELS_OF_A_LINE, ROUNDING

Options = tuple[dict[str, float | bool | str], ...]
Trial = tuple[tuple[object, ...], Options]
"""Shapes of the trained parameters, and the options of the first step."""


def searched(copies: Copies) -> bool:
    """Whether the consecutive models of this line differ in shape between ranks, or are trained
    with different options from the first step on, and no sampler divides the data."""
    first, *others = (_trials(rank, event) for rank, event in copies.members.values())
    differ = any(
        not _same(mine, theirs)
        for trials in others
        for mine, theirs in zip(first, trials, strict=False)
    )
    return differ and not _divide_data(copies)


def adapted(copies: Copies) -> bool:
    """Whether the line creates one model after the other next to a wrapped one: copies that are
    adapted for a few steps and dropped (test-time training, inner loops)."""
    return _beside_wrapped(copies) and all(
        len(_trials(rank, event)) >= MODELS_OF_A_LINE for rank, event in copies.members.values()
    )


def possible(copies: Copies) -> str:
    """Whether the ranks start with different parameters (which torch's default seed does not give
    them), which no rank sent, and nothing else shows that they are to train one model together: in
    words, what does show that they may not; empty if they are."""
    begin = copies.looks[0]
    if step_of(begin) or same(begin) or any(s.averaged for s in begin.values()):
        return ""
    if not _beside_wrapped(copies) and not _divide_data(copies):
        return "no sampler divides the data"
    if _own_start(copies):
        return "with equal ones in another part, which they synchronise"
    return ""


def _own_start(copies: Copies) -> bool:
    """Whether the same ranks start with equal parameters in a model of another optimizer, and
    synchronise its gradients."""
    mine = copies.first[1].optimizer
    others = {e.optimizer for e in copies.first[0].of(Unwrapped)} - {mine}
    for optimizer in others:
        states = [states_of(rank, optimizer) for rank, _ in copies.members.values()]
        begins = {row[0].parameters for row in states if row and not row[0].step}
        synced = all(row and row[-1].exchanged.startswith("gradients") for row in states)
        if synced and len(begins) == 1:
            return True
    return False


def _beside_wrapped(copies: Copies) -> bool:
    return any(event.wrapped for _, event in copies.members.values())


def _divide_data(copies: Copies) -> bool:
    """Whether a sampler divides the data over the ranks."""
    ranks = (rank for rank, _ in copies.members.values())
    return any(e.distributed or e.replicas > 1 for rank in ranks for e in rank.of(LoaderSeen))


def _trials(rank: Rank, event: Unwrapped) -> list[Trial]:
    """The models that the line of this model has created, in the order of their first steps."""
    line = rank.location(event.site)
    options = {e.optimizer: e.groups for e in rank.of(Hyperparameters) if not e.step}
    shapes = {
        e.optimizer: form(e)
        for e in rank.of(Unwrapped)
        if e.optimizer == event.optimizer or (line and rank.location(e.site) == line)
    }
    return [(shape, options.get(number, ())) for number, shape in shapes.items()]


def _same(mine: Trial, theirs: Trial) -> bool:
    pairs = zip(mine[1], theirs[1], strict=False)
    return mine[0] == theirs[0] and all(
        name not in b or _equal(value, b[name]) for a, b in pairs for name, value in a.items()
    )


def _equal(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return isclose(a, b, rel_tol=ROUNDING)
