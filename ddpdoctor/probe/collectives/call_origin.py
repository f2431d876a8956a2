"""Who makes a collective: the program's own line, or a function of torch on its behalf."""

from __future__ import annotations

import os
import sys
from types import FrameType

from ..recording.code_locations import USER
from ..recording.recorder import Recorder

_JOIN = os.path.join("torch", "distributed", "algorithms", "join.py"), "__exit__"


def shadows() -> bool:
    """Whether torch's `Join` is exiting: the calls shadow those of ranks that still train."""
    file, name = _JOIN
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


_FSDP = os.path.join("torch", "distributed", "fsdp", "")


def of_fsdp() -> bool:
    """Whether FSDP makes the call that is being recorded: it carries parts of parameters and their
    gradients, no activations."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _FSDP in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_COLLECTIVES = os.path.join("torch", "distributed", ""), ("distributed_c10d.py", "c10d_logger.py")
_CONTEXTS = os.path.join("torch", "utils", "_contextlib.py")


def internal(recorder: Recorder) -> bool:
    """Whether a function of torch, other than the collective itself, makes the call that is being
    recorded: between it and the user's line are frames of torch."""
    folder, files = _COLLECTIVES
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind, name = recorder.sites.kind(frame.f_code), frame.f_code.co_filename
        if kind is USER:
            return False
        torchs = f"{os.sep}torch{os.sep}" in name and not name.endswith(_CONTEXTS)
        if torchs and not (folder in name and name.endswith(files)):
            return True
        frame = frame.f_back
    return False
