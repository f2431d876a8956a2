"""Which optimizers was a call given that raised?"""

from __future__ import annotations

from types import FrameType

from ...recording.code_locations import USER
from ...recording.recorder import Recorder
from ...training.optimizers import Optimizers


def given_optimizers(recorder: Recorder, error: BaseException) -> tuple[int, ...]:
    """The sites of those that are variables of the library's functions which the innermost line of
    the user's called; none where that line raised itself."""
    inside: list[FrameType] = []
    at = error.__traceback__
    while at is not None:
        user = recorder.sites.kind(at.tb_frame.f_code) == USER
        inside = [] if user else [*inside, at.tb_frame]
        at = at.tb_next
    values = {id(value) for frame in inside for value in frame.f_locals.values()}
    made = (o for o in Optimizers.current.made() if id(o) in values)
    return tuple(dict.fromkeys(map(Optimizers.current.made_at, made)))
