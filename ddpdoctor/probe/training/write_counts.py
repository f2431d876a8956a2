"""How often parameters were written to, as torch counts it; no value is read.

An optimizer writes to a parameter equally often in each of its steps. What is more than that,
something else has written.
"""

from __future__ import annotations

import time
from typing import Any

from ...events import Rewritten
from ...events.pack import pack
from ..recording.recorder import Recorder
from .records import OptimizerModel

PER_STEP = 128
"""Parameters that are asked, at most, for each step since the last time."""

EMITTED_AT_MOST = 300


class WriteCounts:
    """Of the parameters that one optimizer holds of one model.

    Attributes:
        step: of the optimizer, before which they were asked last, -1 for never; versions: what they
            said.
        usual: writes per step, None where it is not known yet; each: as it seems since the last
            time, None where it is no whole number.
    """

    def __init__(self) -> None:
        self.step = -1
        self.versions: list[int] = []
        self.usual: list[int | None] = []
        self.each: list[int | None] = []
        self.emitted = 0

    def since(self, step: int, versions: list[int]) -> dict[int, list[int]]:
        """Which were written to more often than usual, by how often; by index."""
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
            # So many more in each step are the optimizer's own: with weight decay now, say.
            if more > 0 and (steps == 1 or more % steps):
                found.setdefault(more, []).append(index)
        return found


def version(tensor: Any) -> int:
    """How often torch has seen it change in place; -1 where it does not count."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def record_writes(
    recorder: Recorder,
    holding: OptimizerModel,
    writes: WriteCounts,
    step: int,
    *,
    last: bool = False,
) -> None:
    """Before a step of the optimizer, or after its `last`: tell what else has written since."""
    since, due = writes.step, 0 if last else len(holding.positions) // PER_STEP
    if step <= since or step - since < due or writes.emitted >= EMITTED_AT_MOST:
        return
    parameters = holding.parameters(holding.positions)
    try:
        versions = [p._version for p in parameters]
    except (AttributeError, RuntimeError):  # some are gone, or torch does not count theirs
        versions = [version(p) for p in parameters]
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
