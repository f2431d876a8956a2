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
from ...recording.watcher import Watcher, on
from ...tensors.collective_payload import Exchange, memory_of
from ...tensors.limits import ENOUGH_PASSED
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.records import Backward, Step
from .exchanges import Exchanges
from .limits import WORK_STEPS, WORKS_AT_MOST


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


class PendingWorks(Watcher):
    """
    Attributes:
        issued: works of asynchronous calls since the backward.
        running: those of them that were incomplete when the step began.
        steps: by optimizer, how many of its steps ended while such a work ran that nobody had
            waited for, and the line of the last one.
    """

    lost = "asynchronous exchanges that nobody waits for"
    after = (Exchanges,)  # records what the program exchanges itself

    def __init__(self) -> None:
        self.issued: list[PendingWork] = []
        self.running: list[PendingWork] = []
        self._steps: dict[int, tuple[int, int]] = {}
        # Subscriptions to the moments that end the wait; enabled while there are works.
        self._following = Subscriptions()

    @on(call_hooks.issued)
    def _issued(self, recorder: Recorder, call: Issued) -> None:
        carries = Exchanges.current.latest_exchanges()
        gradients_exist = Backwards.current.running() or Backwards.current.since(recorder.step)
        if carries and gradients_exist and recorder.step < WORK_STEPS:
            for work in call.works[: WORKS_AT_MOST - len(self.issued)]:
                self.issued.append(PendingWork(work, call.number, carries, recorder.site()))
            self._following.enable()

    def step_begins(self, gradients: Sequence[Any]) -> None:
        """Note which pending works carry these gradients, which a step is about to apply."""
        if self.issued:
            held = {memory_of(g) for g in gradients}
            flat = ENOUGH_PASSED * sum(g.numel() for g in gradients)
            self.running = [
                pending
                for pending in self.issued
                if any(e.memory in held or e.elements >= flat for e in pending.carries)
                and not pending.work.is_completed()
            ]

    def steps(self, optimizer: int) -> tuple[int, int]:
        """How many steps of an optimizer so far applied gradients whose exchange still ran, and the
        line of one such call (-1 if none)."""
        return self._steps.get(optimizer, (0, -1))

    @on(lifecycle.step_ends, during="_following")
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        written = call_log_of(recorder)
        for pending in self.running:
            # Judged only when the step ends: an optimizer of the user's, or a hook on it, may wait
            # for the works as the first thing in its step. The ring says RETURNED until somebody
            # waits.
            if written is not None and written.ring.state(pending.number) == State.RETURNED:
                number = step.known.number
                self._steps[number] = (self.steps(number)[0] + 1, pending.site)
                break
        self._forget()

    @on(lifecycle.backward_begins, during="_following")
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self._forget()

    def _forget(self) -> None:
        self.issued, self.running = [], []
        self._following.disable()
