"""Which source files, library versions and threads does the rank run with?

Files and versions are recorded at the first step, the number of threads whenever it changes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from ....events import ProgramSeen, ThreadsSeen
from ...recording.code_locations import own_files
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...training import lifecycle
from ...training.records import Step

THREADS_AT = 3
"""Optimizer step from which threads are counted: those that training needs exist by then."""

THREADS_EVERY_S = 5.0

LARGEST_FILE = 4 * 1024 * 1024
"""Bytes; larger files are not read, for that would delay the step."""


class ProgramInfo(Watcher):
    lost = "the program's files and its threads"

    def __init__(self) -> None:
        self.program_emitted = False
        self.threads = -1
        self.looked = 0.0
        self.asked_at = -1

    def install(self) -> None:
        import torch

        self.around(
            torch,
            "set_num_threads",
            before=self._threads_set,
            lost="who chose the number of threads",
        )

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        if self.program_emitted:
            return
        self.program_emitted = True
        recorder.emit(ProgramSeen(at=time.monotonic(), files=_digests(), versions=_versions()))

    def _threads_set(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self.asked_at = recorder.site()

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        now = time.monotonic()
        if recorder.step < THREADS_AT or now - self.looked < THREADS_EVERY_S:
            return
        self.looked = now
        import torch

        compute = torch.get_num_threads()
        if compute == self.threads:
            return
        first, self.threads = self.threads < 0, compute
        recorder.emit(
            ThreadsSeen(
                at=now,
                compute=compute,
                alive=_alive(),
                asked="OMP_NUM_THREADS" in os.environ or self.asked_at >= 0 or not first,
                device=_device(step),
                site=self.asked_at if self.asked_at >= 0 else step.site,
                cpus=tuple(sorted(os.sched_getaffinity(0))),
                set_there=self.asked_at >= 0,
            )
        )


def _digests() -> dict[str, str]:
    main = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    base = os.path.dirname(os.path.abspath(main))
    return {os.path.relpath(file, base): _digest(file) for file in own_files()}


def _digest(file: str) -> str:
    path = Path(file)
    try:
        if path.stat().st_size > LARGEST_FILE:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    """Versions of the packages that are loaded, read without running any of their code."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or not hasattr(module, "__dict__"):
            continue
        version: Any = vars(module).get("__version__")
        if isinstance(version, str) and version and name not in sys.stdlib_module_names:
            found[name] = version[:60]
    return found


def _alive() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _device(step: Step) -> str:
    optimizer = step.optimizer()
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            return str(parameter.device.type)
    return "cpu"
