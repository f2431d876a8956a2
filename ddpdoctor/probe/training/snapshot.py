"""Tensors as they were, to be compared with what they have become."""

from __future__ import annotations

from collections.abc import Set
from math import prod
from typing import Any

from ..tensors.digests import digests, some_values
from .write_counts import version
from .written_gradients import WrittenGradients

Values = list[list[float]]
"""Some of each tensor."""


class TensorSnapshot:
    """Some tensors as they were.

    Attributes:
        latest: digests when it was last seen whether one of torch's functions changes them.
        beside: something else changed them before that.
        functions: those of torch's that have written to any of the model's; `changers` what changed
            some of these, and the site that called it.
        since: values when `latest` was; spans: values before and after what something else than
            these functions made of them.
        touched: of gradients, those that were written to, whether their values are here or not.
    """

    def __init__(self, positions: list[int], tensors: list[Any], sampled: bool) -> None:
        self.positions = positions
        self.numbers = self.latest = digests(tensors)
        self.values = self.since = _values(tensors) if sampled else []
        self.spans: list[tuple[Values, Values]] = []
        self.versions = [] if sampled else [version(t) for t in tensors]
        self.beside = False
        self.functions: dict[str, None] = {}
        self.changers: dict[str, int] = {}
        self.touched: WrittenGradients | None = None

    def only(self, positions: Set[int]) -> TensorSnapshot:
        """The same of those of them that are among these."""
        kept = [n for n, position in enumerate(self.positions) if position in positions]
        part = TensorSnapshot([self.positions[n] for n in kept], [], sampled=True)
        part.numbers, part.latest = ([row[n] for n in kept] for row in (self.numbers, self.latest))
        part.values, part.since = ([v[n] for n in kept] for v in (self.values, self.since))
        part.spans = [([a[n] for n in kept], [b[n] for n in kept]) for a, b in self.spans]
        part.beside, part.touched = self.beside, self.touched
        part.functions, part.changers = self.functions, self.changers
        return part

    def called(self, tensors: list[Any]) -> None:
        """A function of torch's is about to change them: what did so before was something else."""
        if (now := digests(tensors)) != self.latest:
            self.beside, self.latest = True, now
            self.spans.append((self.since, values := _values(tensors)))
            self.since = values
        if self.touched is not None:
            self.touched.look()

    def returned(self, tensors: list[Any], name: str, site: int) -> None:
        """It has."""
        if self.touched is None or self.touched.pass_over():
            self.functions[name] = None
        if (now := digests(tensors)) != self.latest:
            self.changers[name], self.latest = site, now
            self.since = _values(tensors)

    def besides(self, now: TensorSnapshot) -> float:
        """The one number by which something else than these functions multiplied them until now;
        0 where there is none."""
        last = [(self.since, now.values)] if now.numbers != self.latest else []
        spans = [*self.spans, *last]
        return prod(ratio(*span) for span in spans) if spans else 0.0


def _values(tensors: list[Any]) -> Values:
    return [some_values([t]) for t in tensors]


def rewritten(before: TensorSnapshot, now: TensorSnapshot) -> list[int]:
    """Those that were written to, whatever they are now."""
    versions = zip(before.positions, before.versions, now.versions, strict=False)
    return [position for position, old, new in versions if old != new]


def ratio(before: Values, now: Values) -> float:
    """The one number that the values were multiplied by, 0 where there is none."""
    if [len(row) for row in before] != [len(row) for row in now]:
        return 0.0
    rows = zip(before, now, strict=True)
    pairs = [(a, b) for row in rows for a, b in zip(*row, strict=True) if a != 0]
    if not pairs:
        return 0.0
    ratios = [b / a for a, b in pairs]
    middle = sorted(ratios)[len(ratios) // 2]
    if middle and all(abs(r / middle - 1) < 1e-5 for r in ratios):
        return float(f"{middle:.5g}")
    return 0.0


def state_of(optimizer: Any, parameter: Any) -> int:
    """Stands for an optimizer's state of a parameter: another number where it is another tensor, or
    was changed in place."""
    state = getattr(optimizer, "state", None)
    held = None if state is None or parameter is None else state.get(parameter)
    return hash(
        tuple(
            (key, id(v), version(v))
            if hasattr(v, "_version")
            else (key, v if isinstance(v, (int, float, str)) else id(v))
            for key, v in (held or {}).items()
        )
    )
