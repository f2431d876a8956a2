"""Where does the program seed the global random generators, or restore their states, and with
what?"""

from __future__ import annotations

import random
import sys
import time
import zlib
from functools import partial
from types import FrameType
from typing import Any

from ....events import Seeded
from ...recording.code_locations import USER
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Kwargs, Watcher

RECORDED = 64
"""Calls recorded."""


class Seeds(Watcher):
    """
    Attributes:
        recorded: the generator, the seed and the line of the calls on record.
    """

    lost = "where random generators are seeded"

    def __init__(self) -> None:
        self.recorded: set[tuple[str, int, int]] = set()

    def install(self) -> None:
        import torch

        one = torch.manual_seed is torch.random.manual_seed  # until torch._dynamo is imported
        for owners in [(torch.random, torch)] if one else [(torch.random,), (torch,)]:
            self.around(owners, "manual_seed", before=partial(self._seeds, "torch"))
        self.around(random, "seed", before=partial(self._seeds, "random"))
        self.around((torch.random, torch), "set_rng_state", before=partial(self._restores, "torch"))
        self.around(random, "setstate", before=partial(self._restores, "random"))
        if (numpy := sys.modules.get("numpy")) is not None:
            self.around(numpy.random, "seed", before=partial(self._seeds, "numpy"))
            self.around(numpy.random, "set_state", before=partial(self._restores, "numpy"))

    def _seeds(self, generator: str, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        seed = next(iter((*args, *kwargs.values())), None)
        if type(seed) is int:
            self._record(recorder, generator, seed, False)

    def _restores(self, generator: str, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        """Only by a line of the program's own: torch restores states itself, as in checkpointing of
        activations."""
        if len(self.recorded) >= RECORDED or not _by_the_program(recorder):
            return
        state: Any = next(iter((*args, *kwargs.values())), None)
        if hasattr(state, "numpy"):
            state = state.numpy().tobytes()
        self._record(recorder, generator, zlib.crc32(repr(state).encode()), True)

    def _record(self, recorder: Recorder, generator: str, seed: int, restored: bool) -> None:
        if len(self.recorded) >= RECORDED:
            return
        call = generator, seed, recorder.site()
        if call in self.recorded:
            return
        self.recorded.add(call)
        recorder.emit(
            Seeded(
                at=time.monotonic(),
                generator=generator,
                seed=str(seed),
                site=call[2],
                by=recorder.sites.library_called(),
                restored=restored,
            )
        )


def _by_the_program(recorder: Recorder) -> bool:
    """Whether the innermost function that is not the probe's is the program's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ddpdoctor."):
        frame = frame.f_back
    return frame is not None and recorder.sites.kind(frame.f_code) is USER
