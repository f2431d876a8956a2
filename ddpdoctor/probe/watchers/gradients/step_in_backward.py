"""Does an optimizer step inside the backward, on gradients that DDP has not averaged yet?

Hooks on parameters do that (`register_post_accumulate_grad_hook`). A step is counted if the model's
process group had not communicated since the backward began.
"""

from __future__ import annotations

import time

from ....events import SteppedInside
from ...recording import hooks
from ...recording.recorder import Recorder
from ...recording.torch_compat import sequence_number
from ...recording.watcher import Watcher, on
from ...tensors.digests import ABSENT, digests, scattered
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.records import Backward, Step
from ...training.tracked_model import Model
from ..manual_sync.exchanges import Exchanges
from .limits import INSIDE_FIRST


class StepsInBackward:
    """Steps of one model inside backwards.

    Attributes:
        backward: number of the last backward in which an optimizer stepped it.
        count: backwards in which a step came before the group had communicated; the last of them
            is at `backward_site`.
        first, site: number and line of the first of these steps.
        emitted: `count` when it was last recorded.
        carried: `exchanges.numbers_passed()` before the first of these steps.
    """

    def __init__(self) -> None:
        self.backward = self.backward_site = -1
        self.count = self.emitted = self.carried = 0
        self.first = self.site = -1


class SteppedModels(tuple[Model, ...]):
    """The models that an optimizer holds parameters of."""


class StepInBackward(Watcher):
    lost = "steps inside the backward"

    def __init__(self) -> None:
        self._known: dict[Model, StepsInBackward] = {}
        # By model, torch's count of its group's collectives when the backward began, and the
        # line of the backward.
        self._began: dict[Model, tuple[int, int]] = {}

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        for model, inside in self._known.items():
            if inside.count != inside.emitted and _due(inside.count):
                _emit(recorder, model, inside)
        self._began.clear()
        for look in backward.observations:
            self._began[look.model] = look.sequence, backward.site

    @on(lifecycle.step_inside)
    def _step_inside(self, recorder: Recorder, step: Step) -> None:
        stepped = step.known.notes.get(SteppedModels)
        if stepped is None:
            stepped = step.known.notes[SteppedModels] = self._stepped_models(step)
        for model in stepped:
            inside = self._known.setdefault(model, StepsInBackward())
            if inside.backward == Backwards.current.count:
                continue
            inside.backward = Backwards.current.count
            (sequence, site), wrapper = self._began.get(model, (-1, -1)), model.ddp()
            if (
                wrapper is None
                or sequence < 0
                or sequence_number(wrapper.process_group) != sequence
            ):
                continue
            if not inside.count:
                inside.first, inside.site = step.number, step.site
                inside.carried = Exchanges.current.numbers_passed
            inside.count, inside.backward_site = inside.count + 1, site

    def _stepped_models(self, step: Step) -> SteppedModels:
        optimizer = step.optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        held = {id(p) for group in groups for p in group["params"]}
        return SteppedModels(
            model
            for model in self._began
            if any(id(model.parameters[position]()) in held for position in model.expected)
        )

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        for model, inside in self._known.items():
            if inside.count != inside.emitted:
                _emit(recorder, model, inside)


def _due(count: int) -> bool:
    return count <= INSIDE_FIRST or count & (count - 1) == 0


def _emit(recorder: Recorder, model: Model, inside: StepsInBackward) -> None:
    inside.emitted = inside.count
    alive = model.live_parameters()
    each = digests([alive[position] for position in model.expected]) if alive else []
    recorder.emit(
        SteppedInside(
            at=time.monotonic(),
            model=model.number,
            first=inside.first,
            count=inside.count,
            backwards=model.backwards,
            parameters=scattered(hash(tuple(each))) if each and ABSENT not in each else ABSENT,
            carried=Exchanges.current.numbers_passed - inside.carried,
            site=inside.site,
            backward_site=inside.backward_site,
        ),
        vital=True,
    )
