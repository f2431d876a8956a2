"""Does a training step draw random numbers (noise, timesteps), and from which state of torch's
generator?

The state is read before and after what a step does between its batch and its backward, in a few
early steps; it is never advanced.
"""

from __future__ import annotations

import time
from typing import Any

from ....events import StepDraws
from ...recording import rng_state
from ...recording.recorder import Recorder
from ...recording.rng_state import Position
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.records import Backward, Step
from ...training.tracked_model import Model

LOOKED_AT = (1, 2, 4, 8, 16, 32)
"""Steps, by how many were taken before."""


class StepDrawsWatch(Watcher):
    """
    Attributes:
        position: of torch's generator when the batch was there, or the step before was over;
            None where it is not looked at.
        dropping: by model, whether it has modules that draw by themselves (dropout).
    """

    lost = "which random numbers training steps draw"

    def __init__(self) -> None:
        self.position: Position | None = None
        self.dropping: dict[Model, bool] = {}

    @on(lifecycle.step_ends, fast_path=False)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        self._look(recorder)

    @on(lifecycle.loading_ends, fast_path=False)
    def _loading_ends(self, recorder: Recorder, loading: Any) -> None:
        self._look(recorder)

    def _look(self, recorder: Recorder) -> None:
        self.position = rng_state.positions()[0] if recorder.step in LOOKED_AT else None

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        before, self.position = self.position, None
        if before is None or before == rng_state.UNKNOWN:
            return
        after = rng_state.positions()[0]
        pending = [o.model for o in backward.observations if o.expected]
        if after == before or not pending:
            return
        model = pending[0]
        recorder.emit(
            StepDraws(
                at=time.monotonic(),
                model=model.number,
                step=recorder.step,
                before=rng_state.digests((before, before, before))[0],
                after=rng_state.digests((after, after, after))[0],
                dropout=any(self._drops(m) for m in pending),
                site=model.forward_site,
            )
        )

    def _drops(self, model: Model) -> bool:
        known = self.dropping.get(model)
        if known is None:
            inner = model.inner()
            known = inner is None or any(map(_draws_itself, inner.modules()))
            self.dropping[model] = known
        return known


def _draws_itself(module: Any) -> bool:
    """Whether a module draws for dropout, by its class or by an attribute of such a name."""
    if "drop" in type(module).__name__.lower():
        return True
    values = ((n, v) for n, v in vars(module).items() if "drop" in n.lower())
    return any(isinstance(v, (int, float)) and v > 0 for _, v in values)
