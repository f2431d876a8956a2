"""A loss that is not finite, and that the program itself found: it raises or exits before the
backward. The loss is looked for in the variables of the functions that the exception leaves, while
they still exist; nothing is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from ...recording.code_locations import USER
from ...recording.frames import variables
from ...recording.recorder import Recorder
from ...tensors.digests import finite

MOST_VALUES = 200
"""Variables and their elements that are looked at in one function."""
_NAMED = re.compile(r"finite|nan\b|inf(?:inity)?\b", re.IGNORECASE)
"""What the message of a library has that raises for such a loss."""


def own_error(recorder: Recorder, error: BaseException | None, frames: Sequence[FrameType]) -> bool:
    """Whether the program itself raised an exception, or exits (None), or a library did because of
    a value that is not finite.

    Args:
        frames: that it leaves, innermost first.
    """
    if isinstance(error, KeyboardInterrupt) or not frames:
        return False
    kind = recorder.sites.kind(frames[0].f_code)
    return error is None or kind == USER or _NAMED.search(str(error)) is not None


def loss_in(
    recorder: Recorder, frames: Sequence[FrameType], plain: Any
) -> tuple[Any, FrameType] | None:
    """The loss that is not finite, and the outermost function of the user's that has it; None if
    there is none on the CPU.

    Args:
        frames: innermost first; plain: `torch.Tensor`.
    """
    users = [f for f in frames if recorder.sites.kind(f.f_code) == USER]
    for frame in users:
        found = [t for t in _tensors(frame, plain) if not finite(t)]
        if found:
            loss = next((t for t in found if t.numel() == 1), found[0])
            holders = [f for f in users if any(t is loss for t in _tensors(f, plain))]
            return loss, holders[-1]
    return None


def _tensors(frame: FrameType, plain: Any) -> Iterator[Any]:
    """The results of operations with a gradient among the variables of a function, in the order of
    their assignment, and in the dictionaries and lists among them."""
    values = [*variables(frame).values()][:MOST_VALUES]
    for value in values:
        inner: list[Any] = [value]
        if type(value) is dict:
            inner = list(value.values())
        elif type(value) in (list, tuple):
            inner = list(value)
        for one in inner[:MOST_VALUES]:
            if type(one) is plain and one.is_cpu and one.is_floating_point() and one.grad_fn:
                yield one
