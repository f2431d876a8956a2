"""Where does the program seed the global random generators, and with what?"""

from __future__ import annotations

import random
import sys
import time
from functools import partial

from ....events import Seeded
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
        if (numpy := sys.modules.get("numpy")) is not None:
            self.around(numpy.random, "seed", before=partial(self._seeds, "numpy"))

    def _seeds(self, generator: str, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        seed = next(iter((*args, *kwargs.values())), None)
        if type(seed) is not int or len(self.recorded) >= RECORDED:
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
            )
        )
