"""Ends training after some optimizer steps, on every rank after the same one: `--max-steps`."""

from __future__ import annotations

from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.records import Step


class MaxSteps(Watcher):
    lost = "the end of training that --max-steps asks for"

    def __init__(self) -> None:
        self.counting = Subscriptions()
        self.most = 0

    @on(lifecycle.step_begins, fast_path=False)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        if not self.most and (most := recorder.options.get("max_steps")):
            self.most = int(most)
            self.counting.enable()

    @on(lifecycle.step_ends, during="counting")
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        """Exit like a program that calls `sys.exit(0)`. The first optimizer counts: another one may
        step less often."""
        if step.known.number == 0 and step.number + 1 >= self.most:
            reason = "--max-steps ended the program before it could destroy the group"
            recorder.not_observed("process-group-leak", reason)
            raise SystemExit(0)
