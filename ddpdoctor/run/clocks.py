"""One clock for the records of several nodes, whose monotonic clocks began when each was booted."""

from __future__ import annotations

from functools import cache

import msgspec

from ..events import Event, MonitorStarted, RankStarted

SAME_S = 1.0
"""Clocks that differ by less are one: that of a machine, whose wall clock was set meanwhile."""

MOMENTS = ("at", "since", "ended")
"""Attributes of events that are times on the monotonic clock; 0 for never."""


def offset(event: Event) -> float | None:
    """By how much the wall clock was ahead of the monotonic one, from the first event of a file;
    None where it does not say."""
    if isinstance(event, RankStarted | MonitorStarted):
        return event.wall - event.at
    return None


def shifted(event: Event, by_s: float, ahead_s: float = 0.0) -> Event:
    """An event with its times on another monotonic clock.

    Args:
        by_s: what is added to its own; ahead_s: by how much its wall clock is ahead of the other.
    """
    changed = {n: value + by_s for n in _moments(type(event)) if (value := getattr(event, n))}
    if ahead_s and "wall" in event.__struct_fields__:
        changed["wall"] = event.wall - ahead_s  # type: ignore[attr-defined]
    return msgspec.structs.replace(event, **changed)


@cache
def _moments(kind: type[Event]) -> tuple[str, ...]:
    types = {f.name: f.type for f in msgspec.structs.fields(kind)}
    return tuple(n for n in MOMENTS if types.get(n) is float)
