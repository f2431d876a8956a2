"""A NaN loss that leaves the gradients finite: training goes on with a derivative of nothing."""

from __future__ import annotations

from msgspec.structs import replace

from ....events import NonFinite
from ...training.accumulate_grad import GradientHooks

FINITE_DERIVATIVE = ("log", "log2", "log10", "log1p")
"""Operations that give NaN for what they cannot take, and a derivative that is a number there."""


def spares(suspect: NonFinite) -> bool:
    """Whether a loss may be NaN without its gradients."""
    at_fault = suspect.operation in FINITE_DERIVATIVE
    return at_fault and (suspect.kind, suspect.value) == ("loss", "nan")


class FiniteGradients:
    """
    Attributes:
        first: the first loss of which a step was taken with finite gradients that nobody had
            mended, and so many steps like it.
    """

    def __init__(self) -> None:
        self.first: NonFinite | None = None

    def add(
        self, suspect: NonFinite, arrived: GradientHooks, *, step: int, total: int
    ) -> NonFinite | None:
        """A step that is taken with finite gradients: what is to be told."""
        if not (spares(suspect) and arrived.alone):
            return None
        known = self.first or replace(suspect, step=step, total=total)
        self.first = replace(known, spared=known.spared + 1, last=max(known.last, step))
        return self.first if known.spared == 0 else None
