"""Which parameters something other than the optimizer has written to, by torch's version counters.

An optimizer writes to a parameter equally often in each step. Writes beyond that are not its own.
No value is read.
"""

from __future__ import annotations

import time

from ...events import Rewritten
from ...events.pack import pack
from ..recording.recorder import Recorder
from ..tensors.tensor_watch import writes as counted
from .limits import WRITES_ASKED, WRITES_EMITTED
from .records import OptimizerModel


class WriteCounts:
    """The version counters of the parameters of one model that one optimizer trains.

    Attributes:
        step: the optimizer step before which they were read last, -1 for never.
        versions: the counters then.
        usual: writes per step by the optimizer, None if not known yet.
        each: writes per step between the last two readings, None if that is no whole number.
        emitted: events so far.
    """

    def __init__(self) -> None:
        self.step = -1
        self.versions: list[int] = []
        self.usual: list[int | None] = []
        self.each: list[int | None] = []
        self.emitted = 0

    def since(self, step: int, versions: list[int]) -> dict[int, list[int]]:
        """Compare with the counters read now, before `step`: the indices of parameters written to
        more often than usual, by the number of extra writes."""
        steps, before = step - self.step, self.versions
        self.step, self.versions = step, versions
        if not before:
            self.usual, self.each = [None] * len(versions), [None] * len(versions)
            return {}
        made = [now - then for then, now in zip(before, versions, strict=True)]
        if made == [-1 if u is None else u * steps for u in self.usual]:
            return {}
        found: dict[int, list[int]] = {}
        for index, (count, usual) in enumerate(zip(made, self.usual, strict=True)):
            gone = before[index] < 0 or versions[index] < 0 or count < 0
            each = None if gone or count % steps else count // steps
            more = 0 if gone or usual is None else count - usual * steps
            if each is not None and each == self.each[index]:
                self.usual[index] = each
            self.each[index] = each
            # Equally many extra writes in each step are the optimizer's own: it may use weight
            # decay from now on.
            if more > 0 and (steps == 1 or more % steps):
                found.setdefault(more, []).append(index)
        return found


def record_writes(
    recorder: Recorder,
    holding: OptimizerModel,
    writes: WriteCounts,
    step: int,
    *,
    last: bool = False,
) -> None:
    """Record writes by something other than the optimizer since the last reading.

    Args:
        step: number of the optimizer step that begins.
        last: no step begins, the run ends.
    """
    since, due = writes.step, 0 if last else len(holding.positions) // WRITES_ASKED
    if step <= since or step - since < due or writes.emitted >= WRITES_EMITTED:
        return
    parameters = holding.parameters(holding.positions)
    try:
        versions = [p._version for p in parameters]
    except (AttributeError, RuntimeError):  # some are gone, or inference tensors
        versions = [counted(p) for p in parameters]
    for times, found in writes.since(step, versions).items():
        writes.emitted += 1
        recorder.emit(
            Rewritten(
                at=time.monotonic(),
                model=holding.model.number,
                optimizer=holding.optimizer,
                since=since,
                step=step,
                times=times,
                parameters=pack(holding.positions[index] for index in found),
            )
        )
