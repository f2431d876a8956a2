"""Are the tensors of a list that a collective writes to one tensor, so that each rank's part
overwrites the part before (`[tensor] * n`)?"""

from __future__ import annotations

import ast
import sys
import time
from types import CodeType
from typing import Any

from ...events import SharedOutputs
from ..recording.frames import variables
from ..recording.recorder import Recorder
from ..recording.watcher import Watcher
from ..source.ast_cache import parts_of

PLACES = 64
"""Call sites that are looked at, each the first time."""


class OutputLists(Watcher):
    lost = "whether the outputs of a collective are one tensor"

    def __init__(self) -> None:
        self._seen: set[int] = set()  # call sites

    def look(self, recorder: Recorder, place: int, op: str, outputs: Any) -> None:
        """Record that tensors of a list are one, if the program reads the list afterwards."""
        if place in self._seen or len(self._seen) >= PLACES:
            return
        self._seen.add(place)
        if not isinstance(outputs, (list, tuple)) or len(outputs) < 2:
            return
        try:
            starts = [t.data_ptr() for t in outputs if hasattr(t, "data_ptr") and t.numel()]
        except RuntimeError:  # tensors without memory of their own (fake ones, subclasses)
            return
        distinct = len(set(starts))
        if distinct == len(starts) or not all(starts):
            return
        frame = recorder.sites.user_frame(sys._getframe(1))
        if frame is None:
            return
        name = next((n for n, value in variables(frame).items() if value is outputs), "")
        if not name or not _read_after(frame.f_code, name, frame.f_lineno):
            return
        made = _made_at(frame.f_code, name)
        recorder.emit(
            SharedOutputs(
                at=time.monotonic(),
                op=op,
                site=recorder.site(),
                made_site=recorder.sites.number(frame.f_code, made) if made else -1,
                outputs=len(outputs),
                distinct=distinct,
                step=recorder.step,
            )
        )


def _read_after(code: CodeType, name: str, line: int) -> bool:
    """Whether a function reads a variable after a line."""
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and node.lineno > line
        for node in parts_of(code)
    )


def _made_at(code: CodeType, name: str) -> int:
    """The line of a function that makes a variable as `[...] * n`; 0 for none."""
    made = (
        node.lineno
        for node in parts_of(code)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Mult)
        and isinstance(node.value.left, ast.List)
    )
    return next(made, 0)
