"""How many collectives this rank has issued in each group: enough to tell whether two ranks have
synchronised between two moments, without comparing clocks."""

from __future__ import annotations

import time
from typing import Any

from ..recording import torch_compat
from ..recording.recorder import Recorder
from ..recording.watcher import Args, Error, Kwargs, Watcher
from .process_groups import ProcessGroups

DEFAULT = "default"


class SyncPoints(Watcher):
    """Counts by group.

    Attributes:
        _marks: the last count of each group; those of destroyed groups stay.
        generation: how often the default group was destroyed: names of groups are used again.
        stored_at: when a wait for a key of a store last returned; 0 for never.
    """

    lost = "in which order ranks touched files"

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}
        self.generation = 0
        self.stored_at = 0.0

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        self.around((c10d, dist), "destroy_process_group", before=self._leaving)
        for name in ("wait", "get", "multi_get"):  # these block until a rank has set the key
            self.around(dist.Store, name, after=self._stored)  # type: ignore[attr-defined]

    def _stored(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if error is None:
            self.stored_at = time.monotonic()

    def marks(self, recorder: Recorder) -> dict[str, int]:
        """Collectives issued so far, by group: `<generation>.<name>`. Where the backend does not
        count them, those that were logged."""
        log, numbers = recorder.call_log, ProcessGroups.current.numbers
        for name, group in torch_compat.live_groups():
            number = torch_compat.sequence_number(group)
            if number < 0 and log is not None:
                number = log.logged(numbers.get(torch_compat.group_name(group), -1))
            if number >= 0:
                self._marks[f"{self.generation}.{name or DEFAULT}"] = number
        return dict(self._marks)

    def _leaving(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self.marks(recorder)
        if not args and not kwargs:
            self.generation += 1
