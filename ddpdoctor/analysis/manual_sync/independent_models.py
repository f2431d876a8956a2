"""Ranks that are meant to train independent models: trials of a search (certain), or members of an
ensemble (possible)."""

from __future__ import annotations

from math import isclose

import msgspec

from ...events import Hyperparameters, LoaderSeen, Unwrapped, UnwrappedState
from ...report.findings import Confidence, Finding, Severity
from ...run import Rank

ROUNDING = 1e-6
"""Relative distance of numbers that count as equal."""

AGAIN = 3
"""So many models of one line are no longer a generator, a critic and the like."""

Options = tuple[dict[str, float | bool | str], ...]
Trial = tuple[tuple[object, ...], Options]
"""Shapes of the trained parameters, and the options of the first step."""


def searched(alike: dict[Rank, Unwrapped]) -> bool:
    """Whether the consecutive models of this line differ in shape between ranks, or are trained
    with different options from the first step on, and no sampler divides the data."""
    first, *others = (_trials(rank, event) for rank, event in alike.items())
    differ = any(
        not _same(mine, theirs)
        for trials in others
        for mine, theirs in zip(first, trials, strict=False)
    )
    return differ and not _divide_data(alike)


def adapted(alike: dict[Rank, Unwrapped]) -> bool:
    """Whether the line creates one model after the other next to a wrapped one: copies that are
    adapted for a few steps and dropped (test-time training, inner loops)."""
    return any(event.wrapped for event in alike.values()) and all(
        len(_trials(rank, event)) >= AGAIN for rank, event in alike.items()
    )


def doubted(reported: Finding, alike: dict[Rank, Unwrapped]) -> Finding:
    """The finding as a suspected note, where the ranks start with different parameters (which
    torch's default seed does not give them), and nothing else shows that they are to train one
    model together; otherwise the finding itself."""
    begins = [_begin(rank, event.optimizer) for rank, event in alike.items()]
    differ = len({state.parameters for state in begins if state is not None}) > 1
    given = any(state is None or state.averaged for state in begins)
    beside = any(event.wrapped for event in alike.values())
    if not differ or given or beside or _divide_data(alike):
        return reported
    return msgspec.structs.replace(
        reported,
        severity=Severity.NOTE,
        confidence=Confidence.SUSPECTED,
        cause=f"{reported.cause}; the ranks start with different parameters, and no sampler "
        "divides the data: they may be meant to train independent models",
        fix=f"{reported.fix}; if each rank is to train its own model (an ensemble), silence this "
        "with `--ignore model-not-wrapped`",
    )


def _begin(rank: Rank, optimizer: int) -> UnwrappedState | None:
    states = (s for s in rank.of(UnwrappedState) if s.optimizer == optimizer and not s.step)
    return next(states, None)


def _divide_data(alike: dict[Rank, Unwrapped]) -> bool:
    """Whether a sampler divides the data over the ranks."""
    return any(e.distributed or e.replicas > 1 for rank in alike for e in rank.of(LoaderSeen))


def _trials(rank: Rank, event: Unwrapped) -> list[Trial]:
    """The models that the line of this model has created, in the order of their first steps."""
    line = rank.location(event.site)
    options = {e.optimizer: e.groups for e in rank.of(Hyperparameters) if not e.step}
    shapes = {
        e.optimizer: tuple((p.shape, p.dtype) for p in e.parameters)
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
