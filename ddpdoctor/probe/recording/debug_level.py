"""Hides the debug level that the doctor sets (TORCH_DISTRIBUTED_DEBUG=INFO) from FSDP and the like.

The level is for better errors from C++. FSDP would print lines in every backward at it, which the
user did not ask for.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .patching import around, replace
from .recorder import Recorder, current

LOST = "what torch prints at the debug level that the doctor sets is not held back"

PRINTS = ("torch.distributed.fsdp.", "torch.distributed.optim.")
"""Packages of torch that print at the level INFO."""


class _State:
    chosen = False
    """The program has set a level itself: then torch may print."""


_state = _State()


def install() -> None:
    global _state
    dist: Any = importlib.import_module("torch.distributed")
    _state = _State()
    if not dist.is_available():
        return
    original = dist.get_debug_level
    off, info = dist.DebugLevel.OFF, dist.DebugLevel.INFO

    def get_debug_level() -> Any:
        level = original()
        if level != info or _state.chosen or (recorder := current.recorder) is None:
            return level
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        ours = recorder.options.get("debug_level") == "INFO"
        return off if ours and asking.startswith(PRINTS) else level

    replace(dist, "get_debug_level", get_debug_level)
    for name in ("set_debug_level", "set_debug_level_from_env"):
        around(dist, name, before=_chosen, lost=LOST)


def _chosen(recorder: Recorder, args: Any, kwargs: Any) -> None:
    _state.chosen = True
