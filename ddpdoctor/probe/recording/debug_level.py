"""Hides the debug level that the doctor sets (TORCH_DISTRIBUTED_DEBUG=INFO) from FSDP and the like.

The level is for better errors from C++. FSDP would print lines in every backward at it, which the
user did not ask for. The level DETAIL, where the doctor was told to set it, is taken back where the
program's backend is not NCCL: it crashes DistributedDataParallel on gloo.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .patching import replace
from .recorder import Recorder, current
from .watcher import Watcher

PRINTS = ("torch.distributed.fsdp.", "torch.distributed.optim.")
"""Packages of torch that print at the level INFO."""


class DebugLevel(Watcher):
    lost = "what torch prints at the debug level that the doctor sets is not held back"

    def __init__(self) -> None:
        self.chosen = False  # True: the program has set a level itself, so torch may print
        self.lowered = False  # True: from DETAIL to INFO

    def install(self) -> None:
        dist: Any = importlib.import_module("torch.distributed")
        if not dist.is_available():
            return
        original = dist.get_debug_level
        off, info = dist.DebugLevel.OFF, dist.DebugLevel.INFO

        def get_debug_level() -> Any:
            level = original()
            if level != info or self.chosen or (recorder := current.recorder) is None:
                return level
            asking = str(sys._getframe(1).f_globals.get("__name__"))
            ours = self.lowered or recorder.options.get("debug_level") == "INFO"
            return off if ours and asking.startswith(PRINTS) else level

        replace(dist, "get_debug_level", get_debug_level)
        for name in ("set_debug_level", "set_debug_level_from_env"):
            self.around(dist, name, before=self._chosen)

    def group_asked_for(self, recorder: Recorder, backend: str) -> None:
        """The program is about to make the default group; the backend is empty for torch's own
        choice."""
        if recorder.options.get("debug_level") != "DETAIL" or backend == "nccl" or self.chosen:
            return
        dist: Any = sys.modules["torch.distributed"]
        dist.set_debug_level(dist.DebugLevel.INFO)
        self.chosen, self.lowered = False, True
        recorder.not_observed(
            "collective-mismatch",
            f"torch's own comparison of calls (--debug-level detail), which crashes with {backend}"
            if backend
            else "torch's own comparison of calls (--debug-level detail), as no backend was named",
            partly=True,
        )

    def _chosen(self, recorder: Recorder, args: Any, kwargs: Any) -> None:
        self.chosen = True
