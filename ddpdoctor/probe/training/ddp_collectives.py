"""The collectives that DDP issues itself, from C++: logs them like those of the program.

In its constructor; in a forward, to broadcast buffers or to rebuild buckets; in a synchronised
backward, as one call for all its buckets.
"""

from __future__ import annotations

import time
from typing import Any

from ...storage.call_ring import Phase, State
from ..collectives import call_hooks
from ..collectives.call_log import CallLog, call_log_of
from ..collectives.collectives import Collectives, failed, mark
from ..collectives.process_groups import ProcessGroups
from ..recording.recorder import Recorder
from ..recording.torch_compat import joins, sequence_number
from ..recording.watcher import Args, Error, Kwargs, Watcher, on
from ..tensors.autograd_nodes import leaves_of
from . import lifecycle
from .backward_observation import BackwardObservation
from .limits import NODES_FOLLOWED
from .records import Backward, Forward, Step
from .tracked_model import Model
from .wrapped_models import WrappedModels


class DDPCollectives(Watcher):
    """The collectives of DDP that have begun.

    Attributes:
        forwards: (model, number in the ring, sequence number of the group before it); the latter is
            -1 if the forward is certain to communicate.
        backwards: (observation, None on the fast path; number in the ring).
        buffers: there are models that broadcast buffers in their forwards.
    """

    lost = Collectives.lost
    after = (WrappedModels,)  # a model is recorded inside of the call of its constructor

    def __init__(self) -> None:
        self.buffers = False
        self.forwards: list[tuple[Model, int, int]] = []
        self.backwards: list[tuple[BackwardObservation | None, int]] = []

    def install(self) -> None:
        from torch.nn.parallel.distributed import DistributedDataParallel

        self.around(DistributedDataParallel, "__init__", before=_wrapping, after=_settled)

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        self.buffers |= bool(getattr(model.ddp(), "modules_buffers", True))

    @on(lifecycle.forward_begins, fast_path=False)
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        log = recorder.call_log or call_log_of(recorder)
        if log is None:
            return
        now = time.monotonic()
        if not joins(forward.wrapper):
            self.forward_opens(log, forward, now)
        log.ring.enter(Phase.FORWARD, forward.site, now)
        if not forward.grad_enabled:
            log.ring.evaluating(True)

    def forward_opens(self, log: CallLog, forward: Forward, now: float) -> None:
        """Log a forward that is a collective: DDP will broadcast buffers, or rebuild its buckets in
        the order of the first backward."""
        ddp, model = forward.wrapper, forward.model
        if (self.buffers or model.rebuilds) and model.group >= 0:
            certain = self.broadcasts(ddp)
            rebuilds = _rebuilds(forward)
            if certain or rebuilds:
                of = "DDP forward", forward.frame, model.number
                rebuilds &= model.made_at is not None  # else perhaps before it was seen
                call = log.of_model(model.group, *of, now, rebuilds=rebuilds)
                before = -1 if certain else sequence_number(getattr(ddp, "process_group", None))
                self.forwards.append((model, call, before))

    def broadcasts(self, wrapper: Any) -> bool:
        """Whether a wrapper's next forward will broadcast its buffers."""
        return self.buffers and wrapper.will_sync_module_buffers()

    def forward_recurs(self, model: Model, number: int) -> None:
        """A forward on the fast path will broadcast buffers, and is logged under this number."""
        self.forwards.append((model, number, -1))

    @on(lifecycle.forward_ends, fast_path=False)
    def _forward_ends(self, recorder: Recorder, forward: Forward) -> None:
        log = recorder.call_log or call_log_of(recorder)
        if log is None:
            return
        now = time.monotonic()
        self.forward_closes(recorder, log, forward, now)
        log.ring.enter(Phase.USER, forward.site, now)

    def forward_closes(
        self, recorder: Recorder, log: CallLog, forward: Forward, now: float
    ) -> None:
        """What `forward_opens` wrote down is over; the rank enters what follows now."""
        if not self.forwards or self.forwards[-1][0] is not forward.model:
            return
        model, call, before = self.forwards.pop()
        if (
            before >= 0
            and sequence_number(getattr(forward.wrapper, "process_group", None)) == before
        ):
            log.void(call)
        elif forward.error is not None:
            log.ring.mark(call, State.FAILED)
            call_hooks.call_failed.fire(recorder, (call, forward.error))
        else:
            log.ring.done(call, now)
        if forward.error is None and _rebuilds(forward):
            model.rebuilds = False

    @on(lifecycle.backward_begins, fast_path=False)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        log = recorder.call_log or call_log_of(recorder)
        if log is None:
            return
        now = time.monotonic()
        observations = [
            observation
            for observation in backward.observations
            if observation.expected and observation.model.pending_sync
        ]
        observations = [
            observation
            for observation in observations
            if observation.model.group >= 0 and not joins(observation.wrapper)
        ]
        reached = _reached(backward, observations) if len(observations) > 1 else []
        observations = reached or observations
        alone = observations[0].model.number if len(observations) == 1 else -1
        first: dict[int, BackwardObservation] = {}
        for observation in observations:
            first.setdefault(observation.model.group, observation)
        for group, observation in first.items():
            models = {seen.model.number for seen in reached if seen.model.group == group}
            together = tuple(sorted(models)) if alone < 0 else ()
            call = log.of_model(group, "DDP backward", backward.frame, alone, now, together)
            self.backwards.append((observation, call))
        log.ring.enter(Phase.BACKWARD, backward.site, now)

    def backward_recurs(self, number: int) -> None:
        """A backward on the fast path will average gradients, and is logged under this number."""
        self.backwards.append((None, number))

    @on(lifecycle.backward_ends, fast_path=False)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        log = recorder.call_log or call_log_of(recorder)
        if log is None:
            return
        now = time.monotonic()
        self.backward_closes(recorder, log, backward, now)
        log.ring.enter(Phase.USER, backward.site, now)

    def backward_closes(
        self, recorder: Recorder, log: CallLog, backward: Backward, now: float
    ) -> None:
        """Of the collectives that a backward was to make, which it made; as `forward_closes`."""
        if not self.backwards:
            return
        ended, self.backwards = self.backwards, []
        for observation, call in ended:
            silent = not backward.synced if observation is None else not observation.communicated
            if backward.error is not None:
                log.ring.mark(call, State.FAILED)
                call_hooks.call_failed.fire(recorder, (call, backward.error))
            elif silent and (observation is None or observation.sequence >= 0):
                log.void(call)
            else:
                log.ring.done(call, now)

    @on(lifecycle.step_ends, fast_path=False)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        if log := recorder.call_log or call_log_of(recorder):
            now = time.monotonic()
            log.step_ended(recorder.step, now)
            log.ring.enter(Phase.USER, step.site, now)


def _reached(
    backward: Backward, observations: list[BackwardObservation]
) -> list[BackwardObservation]:
    """Those of several models with an open forward that a backward is about; empty where the graph
    does not tell."""
    leaves = leaves_of(backward.roots, NODES_FOLLOWED)
    if not leaves:
        return []
    return [
        seen
        for seen in observations
        if any(id(p) in leaves for p in seen.model.live_parameters() or ())
    ]


def _wrapping(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
    log = call_log_of(recorder)
    if log is None or not ProcessGroups.current.exist():
        return None
    number = ProcessGroups.current.number_of(kwargs.get("process_group"))
    return log.collective(number, "DDP()", log.here()) if number >= 0 else None


def _settled(recorder: Recorder, number: Any, result: Any, error: Error) -> None:
    if error is None:
        mark(number, State.DONE)
    else:
        failed(number, error)


def _rebuilds(forward: Forward) -> bool:
    """Whether DDP rebuilds its buckets in this forward: once, after the first synchronised backward
    (with `static_graph`, the second)."""
    model = forward.model
    return (
        model.rebuilds and forward.grad_enabled and model.synced_backwards > int(model.static_graph)
    )
