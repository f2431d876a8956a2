"""How many collectives this rank has issued in each group: enough to tell whether two ranks have
synchronised between two moments, without comparing clocks."""

from __future__ import annotations

import time
from typing import Any

from ..recording import torch_compat
from ..recording.patching import around
from ..recording.recorder import Recorder

LOST = "in which order ranks touched files"

DEFAULT = "default"


class _SyncPoints:
    """Counts by group.

    Attributes:
        marks: the last count of each group; those of destroyed groups stay.
        generation: how often the default group was destroyed: names of groups are used again.
        stored_at: when a wait for a key of a store last returned.
    """

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.generation = 0
        self.stored_at = 0.0


_sync_points = _SyncPoints()


def install() -> None:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    _sync_points.__init__()  # type: ignore[misc]
    around((c10d, dist), "destroy_process_group", before=_leaving, lost=LOST)
    for name in ("wait", "get", "multi_get"):  # these block until a rank has set the key
        around(dist.Store, name, after=_stored, lost=LOST)  # type: ignore[attr-defined]


def stored_at() -> float:
    """When this process last returned from waiting for a key of a store; 0 for never."""
    return _sync_points.stored_at


def _stored(recorder: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    if error is None:
        _sync_points.stored_at = time.monotonic()


def marks() -> dict[str, int]:
    """Collectives issued so far, by group: `<generation>.<name>`."""
    for name, group in torch_compat.live_groups():
        number = torch_compat.sequence_number(group)
        if number >= 0:
            _sync_points.marks[f"{_sync_points.generation}.{name or DEFAULT}"] = number
    return dict(_sync_points.marks)


def _leaving(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    marks()
    if not args and not kwargs:
        _sync_points.generation += 1
