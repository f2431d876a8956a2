"""Digests and a few values of tensors at one moment, to find later whether the program edited them
and by which factor."""

from __future__ import annotations

from collections.abc import Set
from math import prod
from typing import Any

from ..tensors.digests import digests, some_values
from ..tensors.tensor_watch import writes
from .written_gradients import WrittenGradients

Values = list[list[float]]
"""A few values of each tensor."""


class TensorSnapshot:
    """Some tensors of a model at one moment.

    Functions of torch that edit gradients (`clip_grad_norm_`, say) report when they begin
    (`called`) and end (`returned`); changes in between are theirs, all others the program's own.

    Args:
        sampled: keep a few values too, else version counters.

    Attributes:
        numbers: digests at that moment; `values` are a few values.
        latest: digests when a function of torch last began or ended; `since` are the values then.
        beside: the program itself changed the tensors before `latest`.
        functions: functions of torch that wrote to any gradient of the model.
        changers: functions of torch that changed these tensors, with the site of the call.
        spans: values before and after each change by the program itself.
        touched: for gradients, which were written to, also those without values here.
    """

    def __init__(self, positions: list[int], tensors: list[Any], sampled: bool) -> None:
        self.positions = positions
        self.numbers = self.latest = digests(tensors)
        self.values = self.since = _values(tensors) if sampled else []
        self.spans: list[tuple[Values, Values]] = []
        self.versions = [] if sampled else [writes(t) for t in tensors]
        self.beside = False
        self.functions: dict[str, None] = {}
        self.changers: dict[str, int] = {}
        self.touched: WrittenGradients | None = None

    def only(self, positions: Set[int]) -> TensorSnapshot:
        """A copy restricted to the tensors at some positions."""
        kept = [n for n, position in enumerate(self.positions) if position in positions]
        part = TensorSnapshot([self.positions[n] for n in kept], [], sampled=True)
        part.numbers, part.latest = ([row[n] for n in kept] for row in (self.numbers, self.latest))
        part.values, part.since = ([v[n] for n in kept] for v in (self.values, self.since))
        part.spans = [([a[n] for n in kept], [b[n] for n in kept]) for a, b in self.spans]
        part.beside, part.touched = self.beside, self.touched
        part.functions, part.changers = self.functions, self.changers
        return part

    def called(self, tensors: list[Any]) -> None:
        """A function of torch is about to change the tensors: earlier changes are not its own."""
        if (now := digests(tensors)) != self.latest:
            self.beside, self.latest = True, now
            self.spans.append((self.since, values := _values(tensors)))
            self.since = values
        if self.touched is not None:
            self.touched.look()

    def returned(self, tensors: list[Any], name: str, site: int) -> None:
        """A function of torch has returned (its call at `site`): changes since `called` are its."""
        if self.touched is None or self.touched.pass_over():
            self.functions[name] = None
        if (now := digests(tensors)) != self.latest:
            self.changers[name], self.latest = site, now
            self.since = _values(tensors)

    def besides(self, now: TensorSnapshot) -> float:
        """The factor by which the program itself multiplied the tensors until now; 0 if its changes
        were no multiplication by one factor."""
        last = [(self.since, now.values)] if now.numbers != self.latest else []
        spans = [*self.spans, *last]
        return prod(ratio(*span) for span in spans) if spans else 0.0


def _values(tensors: list[Any]) -> Values:
    return [some_values([t]) for t in tensors]


def rewritten(before: TensorSnapshot, now: TensorSnapshot) -> list[int]:
    """Positions of tensors that were written to, whether their values changed or not."""
    versions = zip(before.positions, before.versions, now.versions, strict=False)
    return [position for position, old, new in versions if old != new]


def ratio(before: Values, now: Values) -> float:
    """The factor that all values were multiplied by; 0 if there is no such factor."""
    if [len(row) for row in before] != [len(row) for row in now]:
        return 0.0
    rows = zip(before, now, strict=True)
    pairs = [(a, b) for row in rows for a, b in zip(*row, strict=True) if a != 0]
    if not pairs:
        return 0.0
    ratios = [b / a for a, b in pairs]
    middle = sorted(ratios)[len(ratios) // 2]
    # 1e-5: the rounding of float32, twice; factors of interest differ by far more.
    if middle and all(abs(r / middle - 1) < 1e-5 for r in ratios):
        return float(f"{middle:.5g}")
    return 0.0


def state_of(optimizer: Any, parameter: Any) -> int:
    """A hash of an optimizer's state of a parameter, without reading values: it changes if a tensor
    in it is replaced or written to."""
    state = getattr(optimizer, "state", None)
    held = None if state is None or parameter is None else state.get(parameter)
    return hash(
        tuple(
            (key, id(v), writes(v))
            if hasattr(v, "_version")
            else (key, v if isinstance(v, (int, float, str)) else id(v))
            for key, v in (held or {}).items()
        )
    )
