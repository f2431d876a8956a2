"""What a backward does to a model: its gradients and its group, looked at before and after."""

from __future__ import annotations

from .accumulators import FiringWatch
from .models import Model
from .torch_private import sequence_number

ALWAYS_EXAMINED = 8
"""The first backwards of a model are examined whole; later ones one in a stride by model size, the
same on every rank."""

PARAMETERS_PER_BACKWARD = 2
SHORTEST_STRIDE = 8


class Look:
    """A model around one backward, for all watchers: it is taken once before, once after.

    Attributes:
        expected: a forward of the wrapper waits for this backward.
        before, after: identity and version of the gradients of `Model.sample`.
        sequence: torch's count of the group's collectives before, `sequence_after` after; -1 where
            unknown.
        firing: what becomes ready, where the backward is examined whole.
    """

    __slots__ = (
        "_group", "after", "before", "expected", "firing", "model", "sequence", "sequence_after",
    )  # fmt: skip

    def __init__(self, model: Model) -> None:
        wrapper = model.ddp()
        self.model = model
        self.expected = model.pending > 0 and wrapper is not None
        self.before = self.after = model.gradients()
        self._group = None if wrapper is None else wrapper.process_group
        self.sequence = self.sequence_after = sequence_number(self._group)
        self.firing: FiringWatch | None = None
        parameters = model.live_parameters() if self.expected and _due(model) else None
        if parameters is not None:
            chosen = [parameters[i] for i in model.expected]
            self.firing = FiringWatch(chosen, model.expected)

    def again(self) -> None:
        """After the backward."""
        self.after = self.model.gradients()
        self.sequence_after = sequence_number(self._group)

    def touched(self) -> bool:
        """Whether the backward reached parameters of the model."""
        return bool(self.firing and self.firing.counts) or self.after != self.before

    def untouched(self) -> tuple[int, ...] | None:
        """Positions whose gradient never became ready; None where that was not watched."""
        if self.firing is None:
            return None
        return tuple(p for p in self.model.expected if p not in self.firing.counts)

    def communicated(self) -> bool:
        return self.sequence_after != self.sequence


def _due(model: Model) -> bool:
    made = model.synced_backwards
    if made < ALWAYS_EXAMINED:
        return True
    stride = max(SHORTEST_STRIDE, len(model.expected) // PARAMETERS_PER_BACKWARD)
    window, place = divmod(made, stride)
    # The place moves from window to window: a branch taken every k-th step must not hide.
    return place == window % stride
