"""The collectives that DDP issues itself, from C++: logs them like those of the program.

In its constructor; in a forward, to broadcast buffers or to rebuild buckets; in a synchronised
backward, as one call for all its buckets.
"""

from __future__ import annotations

import time
from typing import Any

from ...storage.call_ring import Phase, State
from ..collectives import call_hooks, process_groups
from ..collectives.call_log import CallLog, call_log_of
from ..collectives.collectives import LOST, failed, mark
from ..recording.patching import around
from ..recording.recorder import Recorder
from ..recording.torch_compat import joins, sequence_number
from . import lifecycle
from .backward_observation import BackwardObservation
from .records import Backward, Forward, Step
from .tracked_model import Model


def install() -> None:
    from torch.nn.parallel.distributed import DistributedDataParallel

    _open.__init__()  # type: ignore[misc]
    around(DistributedDataParallel, "__init__", before=_wrapping, after=_settled, lost=LOST)
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    # On the fast path `forwards`, `backwards` and `optimizers` call this module themselves.
    lifecycle.forward_begins.subscribe(_forward_begins, fast_path=False, lost=LOST)
    lifecycle.forward_ends.subscribe(_forward_ends, fast_path=False, lost=LOST)
    lifecycle.backward_begins.subscribe(_backward_begins, fast_path=False, lost=LOST)
    lifecycle.backward_ends.subscribe(_backward_ends, fast_path=False, lost=LOST)
    lifecycle.step_ends.subscribe(_step_ends, fast_path=False, lost=LOST)


class _Open:
    """The collectives of DDP that have begun.

    Attributes:
        forwards: (model, number in the ring, sequence number of the group before it); the latter is
            -1 if the forward is certain to communicate.
        backwards: (observation, None on the fast path; number in the ring).
        buffers: there are models that broadcast buffers in their forwards.
    """

    def __init__(self) -> None:
        self.buffers = False
        self.forwards: list[tuple[Model, int, int]] = []
        self.backwards: list[tuple[BackwardObservation | None, int]] = []


_open = _Open()


def _wrapping(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    log = call_log_of(recorder)
    if log is None or not process_groups.exist():
        return None
    number = process_groups.number_of(kwargs.get("process_group"))
    return log.collective(number, "DDP()", log.here()) if number >= 0 else None


def _settled(recorder: Recorder, number: Any, result: Any, error: BaseException | None) -> None:
    if error is None:
        mark(number, State.DONE)
    else:
        failed(number, error)


def _wrapped(recorder: Recorder, model: Model) -> None:
    _open.buffers |= bool(getattr(model.ddp(), "modules_buffers", True))


def _forward_begins(recorder: Recorder, forward: Forward) -> None:
    log = recorder.call_log or call_log_of(recorder)
    if log is None:
        return
    now = time.monotonic()
    if not joins(forward.wrapper):
        forward_opens(log, forward, now)
    log.ring.enter(Phase.FORWARD, forward.site, now)


def forward_opens(log: CallLog, forward: Forward, now: float) -> None:
    """Log a forward that is a collective: DDP will broadcast buffers, or rebuild its buckets in the
    order of the first backward."""
    ddp, model = forward.wrapper, forward.model
    if (_open.buffers or model.rebuilds) and model.group >= 0:
        certain = broadcasts(ddp)
        if certain or _rebuilds(forward):
            call = log.of_model(model.group, "DDP forward", forward.frame, model.number, now)
            before = -1 if certain else sequence_number(getattr(ddp, "process_group", None))
            _open.forwards.append((model, call, before))


def broadcasts(wrapper: Any) -> bool:
    """Whether a wrapper's next forward will broadcast its buffers."""
    return _open.buffers and wrapper.will_sync_module_buffers()


def forward_recurs(model: Model, number: int) -> None:
    """A forward on the fast path will broadcast buffers, and is logged under this number."""
    _open.forwards.append((model, number, -1))


def _forward_ends(recorder: Recorder, forward: Forward) -> None:
    log = recorder.call_log or call_log_of(recorder)
    if log is None:
        return
    now = time.monotonic()
    forward_closes(recorder, log, forward, now)
    log.ring.enter(Phase.USER, forward.site, now)


def forward_closes(recorder: Recorder, log: CallLog, forward: Forward, now: float) -> None:
    """What `forward_opens` wrote down is over; the rank enters what follows now."""
    if not _open.forwards or _open.forwards[-1][0] is not forward.model:
        return
    model, call, before = _open.forwards.pop()
    if before >= 0 and sequence_number(getattr(forward.wrapper, "process_group", None)) == before:
        log.void(call)
    elif forward.error is not None:
        log.ring.mark(call, State.FAILED)
        call_hooks.call_failed.fire(recorder, (call, forward.error))
    else:
        log.ring.done(call, now)
    if forward.error is None and _rebuilds(forward):
        model.rebuilds = False


def _rebuilds(forward: Forward) -> bool:
    """Whether DDP may rebuild its buckets in this forward: once, after the first synchronised
    backward."""
    model = forward.model
    return model.rebuilds and forward.grad_enabled and model.synced_backwards > 0


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
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
    alone = observations[0].model.number if len(observations) == 1 else -1
    first: dict[int, BackwardObservation] = {}
    for observation in observations:
        first.setdefault(observation.model.group, observation)
    for group, observation in first.items():
        call = log.of_model(group, "DDP backward", backward.frame, alone, now)
        _open.backwards.append((observation, call))
    log.ring.enter(Phase.BACKWARD, backward.site, now)


def backward_recurs(number: int) -> None:
    """A backward on the fast path will average gradients, and is logged under this number."""
    _open.backwards.append((None, number))


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    log = recorder.call_log or call_log_of(recorder)
    if log is None:
        return
    now = time.monotonic()
    backward_closes(recorder, log, backward, now)
    log.ring.enter(Phase.USER, backward.site, now)


def backward_closes(recorder: Recorder, log: CallLog, backward: Backward, now: float) -> None:
    """Of the collectives that a backward was to make, which it made; as `forward_closes`."""
    if not _open.backwards:
        return
    ended, _open.backwards = _open.backwards, []
    for observation, call in ended:
        silent = not backward.synced if observation is None else not observation.communicated
        if backward.error is not None:
            log.ring.mark(call, State.FAILED)
            call_hooks.call_failed.fire(recorder, (call, backward.error))
        elif silent and (observation is None or observation.sequence >= 0):
            log.void(call)
        else:
            log.ring.done(call, now)


def _step_ends(recorder: Recorder, step: Step) -> None:
    if log := recorder.call_log or call_log_of(recorder):
        now = time.monotonic()
        log.step_ended(recorder.step, now)
        log.ring.enter(Phase.USER, step.site, now)
