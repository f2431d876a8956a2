"""Exchanges by hand that still run when an optimizer applies what they carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ....storage.call_ring import State
from ...collectives import call_hooks
from ...collectives.call_hooks import Issued
from ...collectives.call_log import tape
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...tensors.collective_payload import ENOUGH, Exchange
from ...tensors.gradient_versions import memory_of
from ...training import backwards, lifecycle
from ...training.records import Backward, Step
from . import exchanges

LOST = "asynchronous exchanges that nobody waits for"

STEPS = 32
"""So many first steps are looked at: until the step is over their works are kept alive."""

MOST = 4096


class PendingWork(NamedTuple):
    """An asynchronous call.

    Attributes:
        number: in the ring.
        carries: as in `exchanges`.
    """

    work: Any
    number: int
    carries: tuple[Exchange, ...]
    site: int


class _Flights:
    """Attributes:
    issued: since the backward; running: those that were when the step began.
    steps: that ended while one ran that nobody had waited for, and the line of the last such one,
        by the number of the optimizer.
    """

    def __init__(self) -> None:
        self.issued: list[PendingWork] = []
        self.running: list[PendingWork] = []
        self.steps: dict[int, tuple[int, int]] = {}


_flights = _Flights()
_following = Subscriptions()
"""Of what ends it, while any is known."""


def install() -> None:
    _flights.__init__()  # type: ignore[misc]
    call_hooks.issued.subscribe(_issued, lost=LOST)
    _following[:] = (
        lifecycle.backward_begins.subscribe(_backward_begins, lost=LOST, awake=False),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST, awake=False),
    )


def _issued(recorder: Recorder, call: Issued) -> None:
    carries = exchanges.latest()
    made = backwards.running() or backwards.since(recorder.step)  # gradients
    if carries and made and recorder.step < STEPS:
        for work in call.works[: MOST - len(_flights.issued)]:
            _flights.issued.append(PendingWork(work, call.number, carries, recorder.site()))
        _following.enable()


def step_begins(gradients: Sequence[Any]) -> None:
    """These are about to be applied."""
    if _flights.issued:
        held = {memory_of(g) for g in gradients}
        flat = ENOUGH * sum(g.numel() for g in gradients)
        _flights.running = [
            flight
            for flight in _flights.issued
            if any(e.memory in held or e.elements >= flat for e in flight.carries)
            and not flight.work.is_completed()
        ]


def steps(optimizer: int) -> tuple[int, int]:
    """How many of its steps so far applied gradients whose exchange still ran; the line of a
    call."""
    return _flights.steps.get(optimizer, (0, -1))


def _step_ends(recorder: Recorder, step: Step) -> None:
    written = tape(recorder)
    for flight in _flights.running:
        # An optimizer of the user's, or a hook of it, may wait as the first thing in its step.
        if written is not None and written.ring.state(flight.number) == State.RETURNED:
            number = step.known.number
            _flights.steps[number] = (steps(number)[0] + 1, flight.site)
            break
    _forget()


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    _forget()


def _forget() -> None:
    _flights.issued, _flights.running = [], []
    _following.disable()
