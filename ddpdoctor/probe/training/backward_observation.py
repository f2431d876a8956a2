"""What a backward did to a wrapped model: its gradients and the count of collectives of its group,
read before and after."""

from __future__ import annotations

from collections.abc import Sequence

from ..recording.torch_compat import sequence_number
from .accumulate_grad import FiringWatch
from .tracked_model import Model


class BackwardObservation:
    """One model during one backward, read once for all watchers.

    Attributes:
        wrapper: the DDP object, None if it is gone.
        group: its process group, None if the wrapper is gone.
        expected: a forward of the model waits for this backward.
        before, after: (id, version) of the gradients of `Model.sample`.
        sequence, sequence_after: torch's count of the group's collectives, before and after the
            backward; -1 if unknown.
        communicated: the group communicated during the backward, for this model.
        touched: the backward reached parameters of the model.
        watched: positions of the parameters whose gradients are counted, if this backward is
            examined, or the one before it over the same forward was.
        firing: counts these gradients as they become ready; None if there are none to count.
    """

    __slots__ = (
        "after", "before", "communicated", "expected", "firing", "group", "model", "sequence",
        "sequence_after", "touched", "watched", "wrapper",
    )  # fmt: skip

    def __init__(self, model: Model) -> None:
        wrapper = self.wrapper = None if model.wrapper is None else model.wrapper()
        self.model = model
        self.expected = model.pending > 0 and wrapper is not None
        self.before = self.after = model.gradients()
        self.communicated = self.touched = False
        self.group = None if wrapper is None else wrapper.process_group
        self.sequence = self.sequence_after = sequence_number(self.group)
        self.firing: FiringWatch | None = None
        whole = self.expected and model.examined()
        self.watched: Sequence[int] = model.expected if whole else model.left
        parameters = model.live_parameters() if self.watched else None
        if parameters is not None:
            self.firing = FiringWatch([parameters[i] for i in self.watched], self.watched)

    def after_backward(self) -> None:
        """Read again after the backward."""
        self.after = self.model.gradients()
        self.sequence_after = sequence_number(self.group)
        self.touched = self.after != self.before or bool(self.firing and self.firing.counts)
        self.communicated = self.sequence_after != self.sequence
        if self.sequence < 0:  # the backend does not count: DDP is believed to do as it should
            self.communicated = self.expected and self.touched and self.model.armed

    def touched_positions(self) -> frozenset[int]:
        """Which of `Model.sample` the backward reached."""
        if self.before == self.after:
            return frozenset()
        changed = zip(self.model.sample, self.before, self.after, strict=True)
        return frozenset([p for p, old, new in changed if old != new])

    def untouched(self) -> tuple[int, ...] | None:
        """Positions of expected parameters that got no gradient; None if these were not counted."""
        if self.firing is None:
            return None
        used = self.firing.given if self.model.find_unused else self.firing.counts
        return tuple(p for p in self.watched if p not in used)
