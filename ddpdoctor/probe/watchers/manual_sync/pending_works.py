"""Does an optimizer apply gradients while an asynchronous all-reduce of them still runs?

Works are collected from the backward on, asked before the step whether they are complete, and after
it whether anybody has waited for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ....storage.call_ring import State
from ...collectives import call_hooks
from ...collectives.call_hooks import Issued
from ...collectives.call_log import call_log_of
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...tensors.collective_payload import ENOUGH, Exchange
from ...tensors.gradient_versions import memory_of
from ...training import backwards, lifecycle
from ...training.records import Backward, Step
from . import exchanges

LOST = "asynchronous exchanges that nobody waits for"

STEPS = 32
"""Only the first steps are looked at: works (and their tensors) are kept alive until the step ends,
which could cost memory in the long run."""

MOST = 4096
"""Works kept at a time."""


class PendingWork(NamedTuple):
    """An asynchronous collective between backward and step.

    Attributes:
        work: torch's `Work`.
        number: of the call in the ring file.
        carries: the tensors that were passed to it.
        site: line of the call.
    """

    work: Any
    number: int
    carries: tuple[Exchange, ...]
    site: int


class _PendingWorks:
    """
    Attributes:
        issued: works of asynchronous calls since the backward.
        running: those of them that were incomplete when the step began.
        steps: by optimizer, how many of its steps ended while such a work ran that nobody had
            waited for, and the line of the last one.
    """

    def __init__(self) -> None:
        self.issued: list[PendingWork] = []
        self.running: list[PendingWork] = []
        self.steps: dict[int, tuple[int, int]] = {}


_pending = _PendingWorks()
_following = Subscriptions()
"""Subscriptions to the moments that end the wait; enabled while there are works."""


def install() -> None:
    _pending.__init__()  # type: ignore[misc]
    call_hooks.issued.subscribe(_issued, lost=LOST)
    _following[:] = (
        lifecycle.backward_begins.subscribe(_backward_begins, lost=LOST, enabled=False),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST, enabled=False),
    )


def _issued(recorder: Recorder, call: Issued) -> None:
    carries = exchanges.latest_exchanges()
    gradients_exist = backwards.running() or backwards.since(recorder.step)
    if carries and gradients_exist and recorder.step < STEPS:
        for work in call.works[: MOST - len(_pending.issued)]:
            _pending.issued.append(PendingWork(work, call.number, carries, recorder.site()))
        _following.enable()


def step_begins(gradients: Sequence[Any]) -> None:
    """Note which pending works carry these gradients, which a step is about to apply."""
    if _pending.issued:
        held = {memory_of(g) for g in gradients}
        flat = ENOUGH * sum(g.numel() for g in gradients)
        _pending.running = [
            pending
            for pending in _pending.issued
            if any(e.memory in held or e.elements >= flat for e in pending.carries)
            and not pending.work.is_completed()
        ]


def steps(optimizer: int) -> tuple[int, int]:
    """How many steps of an optimizer so far applied gradients whose exchange still ran, and the
    line of one such call (-1 if none)."""
    return _pending.steps.get(optimizer, (0, -1))


def _step_ends(recorder: Recorder, step: Step) -> None:
    written = call_log_of(recorder)
    for pending in _pending.running:
        # Judged only when the step ends: an optimizer of the user's, or a hook on it, may wait for
        # the works as the first thing in its step. The ring says RETURNED until somebody waits.
        if written is not None and written.ring.state(pending.number) == State.RETURNED:
            number = step.known.number
            _pending.steps[number] = (steps(number)[0] + 1, pending.site)
            break
    _forget()


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    _forget()


def _forget() -> None:
    _pending.issued, _pending.running = [], []
    _following.disable()
