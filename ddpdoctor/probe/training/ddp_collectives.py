"""Collectives that a wrapped model makes by itself, from C++: written to the ring as any other."""

from __future__ import annotations

import time
from typing import Any

from ...storage.call_ring import Phase, State
from ..collectives import call_hooks, process_groups
from ..collectives.call_log import CallLog, tape
from ..collectives.collectives import LOST, failed, mark
from ..recording.patching import around
from ..recording.recorder import Recorder
from ..recording.torch_compat import joins, sequence_number
from . import lifecycle
from .backward_observation import Look
from .records import Backward, Forward, Step
from .tracked_model import Model


def install() -> None:
    from torch.nn.parallel.distributed import DistributedDataParallel

    _open.__init__()  # type: ignore[misc]
    around(DistributedDataParallel, "__init__", before=_wrapping, after=_settled, lost=LOST)
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    # Of routine steps the brackets themselves tell.
    lifecycle.forward_begins.subscribe(_forward_begins, routine=False, lost=LOST)
    lifecycle.forward_ends.subscribe(_forward_ends, routine=False, lost=LOST)
    lifecycle.backward_begins.subscribe(_backward_begins, routine=False, lost=LOST)
    lifecycle.backward_ends.subscribe(_backward_ends, routine=False, lost=LOST)
    lifecycle.step_ends.subscribe(_step_ends, routine=False, lost=LOST)


class _Open:
    """Calls of wrapped models that have begun.

    Attributes:
        forwards: model, call, and torch's count of the group's collectives before it, where nothing
            else tells whether there was one.
        backwards: look (None in a routine step), and call.
        buffers: there are models whose forwards broadcast them.
    """

    def __init__(self) -> None:
        self.buffers = False
        self.forwards: list[tuple[Model, int, int]] = []
        self.backwards: list[tuple[Look | None, int]] = []


_open = _Open()


def _wrapping(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = tape(recorder)
    if written is None or not process_groups.exist():
        return None
    number = process_groups.number_of(kwargs.get("process_group"))
    return written.collective(number, "DDP()", written.here()) if number >= 0 else None


def _settled(recorder: Recorder, number: Any, result: Any, error: BaseException | None) -> None:
    if error is None:
        mark(number, State.DONE)
    else:
        failed(number, error)


def _wrapped(recorder: Recorder, model: Model) -> None:
    _open.buffers |= bool(getattr(model.ddp(), "modules_buffers", True))


def _forward_begins(recorder: Recorder, forward: Forward) -> None:
    written = recorder.tape or tape(recorder)
    if written is None:
        return
    now = time.monotonic()
    if not joins(forward.wrapper):
        forward_opens(written, forward, now)
    written.ring.enter(Phase.FORWARD, forward.site, now)


def forward_opens(written: CallLog, forward: Forward, now: float) -> None:
    """A forward that will broadcast the buffers, or in which DDP orders its buckets anew as the
    first backward had them, is a collective of its group. The rank enters the forward now."""
    ddp, model = forward.wrapper, forward.model
    if (_open.buffers or model.rebuilds) and model.group >= 0:
        certain = broadcasts(ddp)
        if certain or _rebuilds(forward):
            call = written.of_model(model.group, "DDP forward", forward.frame, model.number, now)
            before = -1 if certain else sequence_number(getattr(ddp, "process_group", None))
            _open.forwards.append((model, call, before))


def broadcasts(wrapper: Any) -> bool:
    """Whether a wrapper's forward will broadcast its buffers."""
    return _open.buffers and wrapper.will_sync_module_buffers()


def forward_recurs(model: Model, number: int) -> None:
    """In a routine step a forward will broadcast the buffers, and that was written down."""
    _open.forwards.append((model, number, -1))


def _forward_ends(recorder: Recorder, forward: Forward) -> None:
    written = recorder.tape or tape(recorder)
    if written is None:
        return
    now = time.monotonic()
    forward_closes(recorder, written, forward, now)
    written.ring.enter(Phase.USER, forward.site, now)


def forward_closes(recorder: Recorder, written: CallLog, forward: Forward, now: float) -> None:
    """What `forward_opens` wrote down is over; the rank enters what follows now."""
    if not _open.forwards or _open.forwards[-1][0] is not forward.model:
        return
    model, call, before = _open.forwards.pop()
    if before >= 0 and sequence_number(getattr(forward.wrapper, "process_group", None)) == before:
        written.void(call)
    elif forward.error is not None:
        written.ring.mark(call, State.FAILED)
        call_hooks.call_failed.fire(recorder, (call, forward.error))
    else:
        written.ring.done(call, now)
    if forward.error is None and _rebuilds(forward):
        model.rebuilds = False


def _rebuilds(forward: Forward) -> bool:
    model = forward.model
    return model.rebuilds and forward.grad_enabled and model.synced_backwards > 0


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    written = recorder.tape or tape(recorder)
    if written is None:
        return
    now = time.monotonic()
    looks = [look for look in backward.looks if look.expected and look.model.pending_sync]
    looks = [look for look in looks if look.model.group >= 0 and not joins(look.wrapper)]
    alone = looks[0].model.number if len(looks) == 1 else -1
    first: dict[int, Look] = {}
    for look in looks:
        first.setdefault(look.model.group, look)
    for group, look in first.items():
        call = written.of_model(group, "DDP backward", backward.frame, alone, now)
        _open.backwards.append((look, call))
    written.ring.enter(Phase.BACKWARD, backward.site, now)


def backward_recurs(number: int) -> None:
    """In a routine step a backward will average the gradients, and that was written down."""
    _open.backwards.append((None, number))


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    written = recorder.tape or tape(recorder)
    if written is None:
        return
    now = time.monotonic()
    backward_closes(recorder, written, backward, now)
    written.ring.enter(Phase.USER, backward.site, now)


def backward_closes(recorder: Recorder, written: CallLog, backward: Backward, now: float) -> None:
    """Of the collectives that a backward was to make, which it made; as `forward_closes`."""
    if not _open.backwards:
        return
    ended, _open.backwards = _open.backwards, []
    for look, call in ended:
        silent = not backward.synced if look is None else not look.communicated
        if backward.error is not None:
            written.ring.mark(call, State.FAILED)
            call_hooks.call_failed.fire(recorder, (call, backward.error))
        elif silent and (look is None or look.sequence >= 0):
            written.void(call)
        else:
            written.ring.done(call, now)


def _step_ends(recorder: Recorder, step: Step) -> None:
    if written := recorder.tape or tape(recorder):
        now = time.monotonic()
        written.step_ended(recorder.step, now)
        written.ring.enter(Phase.USER, step.site, now)
