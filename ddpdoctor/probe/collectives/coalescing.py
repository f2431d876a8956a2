"""Calls inside of torch's `_coalescing_manager`: nothing is communicated before its exit, which
issues them all at once and waits for them, or leaves that to the `wait` of what it returns.

In the ring they are issued until then; the last one stands for them all where the rank waits.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ...storage.call_ring import State
from ..recording.frames import disguise, unframe
from ..recording.patching import replace
from ..recording.recorder import Recorder, current_recorder
from ..recording.threads import Inside
from ..recording.torch_compat import is_work
from . import call_hooks
from .call_log import call_log_of
from .process_groups import ProcessGroups

LOST = "calls inside of `_coalescing_manager`"

_thread = threading.local()


def _open() -> Coalesced | None:
    """What is open in this thread, which may be a rank of its own."""
    return getattr(_thread, "open", None)


class Coalesced:
    """One `with _coalescing_manager(...)` of a process group.

    Attributes:
        group: number of the process group.
        numbers: of its calls in the ring.
    """

    def __init__(self, manager: Any, group: int) -> None:
        self.manager, self.group = manager, group
        self.numbers: list[int] = []
        self.calls: Any = None

    def __enter__(self) -> Any:
        self.calls = self.manager.__enter__()
        _thread.open = self
        return self.calls

    def __exit__(self, *error: Any) -> Any:
        _thread.open = None
        recorder = current_recorder()
        last = self.numbers[-1] if self.numbers and error[0] is None else None
        self._mark(recorder, [] if last is None else [last], State.WAITING)
        began = time.monotonic()
        try:
            swallowed = self.manager.__exit__(*error)
        except BaseException as raised:
            self._mark(recorder, self.numbers, State.FAILED)
            if recorder is not None and last is not None:
                call_hooks.call_failed.fire(recorder, (last, raised))
            unframe(raised)
            raise
        self._mark(recorder, self.numbers[:-1] if last is not None else self.numbers, State.DONE)
        if recorder is not None and last is not None:
            self._issued(recorder, last)
            call_hooks.waited.fire(recorder, time.monotonic() - began)
        return swallowed

    def _mark(self, recorder: Recorder | None, numbers: list[int], state: State) -> None:
        if recorder is None:
            return
        try:
            if log := call_log_of(recorder):
                for number in numbers:
                    log.ring.mark(number, state)
        except Exception as error:
            recorder.trouble("coalescing", error, LOST)

    def _issued(self, recorder: Recorder, last: int) -> None:
        """The works that are left to `wait` stand for the last call."""
        try:
            works = tuple(w for w in getattr(self.calls, "works", ()) if is_work(w))
            if works and (log := call_log_of(recorder)):
                log.issued(last, works)
                call_hooks.issued.fire(recorder, call_hooks.Issued(last, works))
            else:
                self._mark(recorder, [last], State.DONE)
        except Exception as error:
            recorder.trouble("coalescing", error, LOST)


def coalesced(ring: Any, number: int) -> bool:
    """Whether a call that has just returned is only issued at the exit of a manager."""
    manager = _open()
    known = ring.call(number) if manager is not None else None
    if manager is None or known is None or known[0] != manager.group:
        return False
    manager.numbers.append(number)
    ring.mark(number, State.RETURNED)
    return True


def watch(inside: Inside) -> None:
    """Wrap `_coalescing_manager`.

    Args:
        inside: threads in a call that uses it itself, such as `batch_isend_irecv`.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    original = getattr(c10d, "_coalescing_manager", None)
    if original is None:
        return

    def manager(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        recorder = None if inside or _open() is not None else current_recorder()
        if recorder is None or recorder.disabled("coalescing"):
            return made
        try:
            group = args[0] if args else kwargs.get("group")
            return Coalesced(made, 0 if group is None else ProcessGroups.current.number_of(group))
        except Exception as error:
            recorder.trouble("coalescing", error, LOST)
            return made

    disguise(manager, original)
    for holder in (c10d, dist):
        if vars(holder).get("_coalescing_manager") is original:
            replace(holder, "_coalescing_manager", manager)
