"""Is a NaN loss applied although its gradients are finite?

The derivative of `log` is finite where its value is NaN, so that training goes on unnoticed.
"""

from __future__ import annotations

from msgspec.structs import replace

from ....events import NonFinite
from ...training.accumulate_grad import GradientHooks

FINITE_DERIVATIVE = ("log", "log2", "log10", "log1p")
"""Operations that are NaN for negative inputs and have a finite derivative there."""


def leaves_gradients_finite(suspect: NonFinite) -> bool:
    """Whether a NaN loss of this origin can have finite gradients."""
    at_fault = suspect.operation in FINITE_DERIVATIVE
    return at_fault and (suspect.kind, suspect.value) == ("loss", "nan")


class FiniteGradients:
    """
    Attributes:
        first: the first NaN loss whose finite gradients a step applied; its `spared` counts such
            steps.
    """

    def __init__(self) -> None:
        self.first: NonFinite | None = None

    def add(
        self, suspect: NonFinite, arrived: GradientHooks, *, step: int, total: int
    ) -> NonFinite | None:
        """Count a step that applies finite gradients of a NaN loss.

        Returns the event to record, for the first such step only. Steps whose gradients the program
        may have repaired (`arrived.alone` is False) do not count.
        """
        if not (leaves_gradients_finite(suspect) and arrived.alone):
            return None
        known = self.first or replace(suspect, step=step, total=total)
        self.first = replace(known, spared=known.spared + 1, last=max(known.last, step))
        return self.first if known.spared == 0 else None
