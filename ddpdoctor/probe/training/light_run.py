"""What the calls of light steps leave undone, made up for before anything else reads or changes it.

In a light step the rank only marks its phase and its collectives in the ring and adds up times,
in the few functions that torch calls anyway: each further function, and each further object, is
one more that the training has thrown out of the processor's caches. The counts of the model, the
call log, the record of steps and the accounts of time follow here, for all light steps at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from threading import get_ident

from ...storage.call_ring import Phase
from ..recording.recorder import Recorder
from .backwards import Backwards
from .forwards import Forwards
from .records import Optimizer
from .steady_state import Plan, PlannedCall, steady_state

LOST = "steps that were counted only"


class LightRun:
    """A run of light steps.

    Args:
        record: called with (optimizer, steps of it, seconds since the step before the first, and in
            the steps themselves) to record optimizer steps that are over.
    """

    def __init__(
        self, recorder: Recorder, plan: Plan, record: Callable[[Optimizer, int, float, float], None]
    ) -> None:
        self.recorder, self.plan, self.record = recorder, plan, record
        self.thread = get_ident()

    def begin(self) -> None:
        """The step that follows is light: see to it that `catch_up` is called in time."""
        self.recorder.behind = self.catch_up

    def catch_up(self) -> None:
        """Account for all calls so far; the one that is running goes on as if it had not been
        light. Other threads see the counts of the last time."""
        if get_ident() != self.thread:
            return
        recorder, plan = self.recorder, self.plan
        recorder.behind = None
        try:
            if plan.last is not None or plan.inside is not None:
                self._settle()
        except Exception as error:
            plan.light, plan.last, plan.owed, plan.inside, plan.wraps = 0, None, None, None, 0
            steady_state.give_up()
            recorder.trouble("light-steps", error, LOST)
        if plan.light:
            recorder.behind = self.catch_up

    def _settle(self) -> None:
        plan, recorder = self.plan, self.recorder
        call, wraps, inside = plan.owed, plan.wraps, plan.inside
        plan.owed, plan.wraps, plan.inside = None, 0, None
        passed: list[PlannedCall] = []
        while call is not None and (call is not plan.next or wraps):
            passed.append(call)
            wraps -= call.following is None
            call = call.following or plan.first
        if plan.last is not None:
            self._account(plan.last)
        plan.last = None
        number = recorder.step - sum(one.optimizer is not None for one in passed)
        steps: Counter[Optimizer] = Counter()
        now = time.monotonic()
        for one in passed:
            if one.call is not None and (one.broadcasts or (one.backward is not None and one.sync)):
                plan.call_log.passed(one.call, number)
            if one.forward is not None:
                Forwards.current.passed(plan.model, one, number)
            elif one.backward is not None:
                Backwards.current.passed(plan.model, one, number)
            elif one.optimizer is not None:
                number += 1
                steps[one.optimizer] += 1
                plan.call_log.step_ended(number, now)
        plan.averaged = False
        one = plan.first
        while one is not plan.next and one.following is not None:
            plan.averaged = one.sync if one.backward is not None else plan.averaged
            one = one.following
        for one in _calls(plan):
            if one.optimizer is not None and steps[one.optimizer]:
                self.record(one.optimizer, steps[one.optimizer], one.wall_s, one.inside_s)
                one.wall_s = one.inside_s = 0.0
        if inside is not None:
            self._go_on(inside)

    def _account(self, last: PlannedCall) -> None:
        """Bring the ring's accounts up to the end of the last call."""
        plan = self.plan
        stretches: list[tuple[int, int, float, float]] = []
        every = _calls(plan)
        before = every[-1]
        if plan.loads is not None:
            every.insert(0, plan.loads)
        gaps, plan.gaps = plan.gaps, []
        for one, seconds, step in plan.long:
            plan.ring.add_long(one.site << 4 | _phase(one), seconds, step)
        plan.long.clear()
        for one in every:
            stretches.append((Phase.USER, before.site, one.before_s, 0.0))
            for _, seconds, step in (gap for gap in gaps if gap[0] is one):
                plan.ring.add_long(before.site << 4 | Phase.USER, seconds, step)
            if one is not plan.loads or one.inside_s:
                stretches.append((_phase(one), one.site, one.inside_s, one.waited_s))
                before = one
            if one.forward is not None:
                Forwards.current.seconds += one.inside_s
            elif one.backward is not None:
                Backwards.current.seconds += one.inside_s
            one.before_s = one.waited_s = 0.0
            if one.optimizer is None:
                one.inside_s = 0.0
        plan.ring.passed(stretches, _phase(last), last.site, plan.left)
        plan.elsewhere = 0.0

    def _go_on(self, call: PlannedCall) -> None:
        """A call is running: begin it as on the fast path."""
        plan, number = self.plan, self.recorder.step
        plan.ring.enter(_phase(call), call.site, plan.began)
        if call.logged >= 0 and call.call is not None:
            plan.call_log.passed(call.call, number)
        if call.forward is not None:
            Forwards.current.goes_on(plan, call, number)
        elif call.backward is not None:
            Backwards.current.goes_on(plan, call)
        elif call.optimizer is not None and call.optimizer.step is not None:
            call.optimizer.step.number = call.optimizer.steps
            call.optimizer.step.began = call.optimizer.began = plan.began
        call.logged = -1


def _calls(plan: Plan) -> list[PlannedCall]:
    found, one = [plan.first], plan.first.following
    while one is not None:
        found.append(one)
        one = one.following
    return found


def _phase(call: PlannedCall) -> int:
    if call.forward is not None:
        return Phase.FORWARD
    if call.backward is not None:
        return Phase.BACKWARD
    return Phase.DATA if call.optimizer is None else Phase.OPTIMIZER
