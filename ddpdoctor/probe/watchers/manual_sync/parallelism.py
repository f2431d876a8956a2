"""What ranks do together that replicas do not do: those that have a part of a model each."""

from __future__ import annotations

from collections.abc import Iterable

from ...collectives import process_groups

POINT_TO_POINT = "point-to-point"
ALL_TO_ALL = "all-to-all"
IN_BACKWARD = "in backward"


class _Schemes:
    """What was ever done.

    Attributes:
        special: `all-to-all`, `point-to-point`, `in backward`; empty for nothing.
        partners: the other ranks that it was done with, -1 for any.
        swaps: `all_to_all` of floating-point numbers, outside of backwards and inside.
    """

    def __init__(self) -> None:
        self.special = ""
        self.partners: set[int] = set()
        self.swaps = [0, 0]


_schemes = _Schemes()


def install() -> None:
    _schemes.__init__()  # type: ignore[misc]


def seen(kind: str, partners: Iterable[int]) -> None:
    if kind != POINT_TO_POINT or not _schemes.special:
        _schemes.special = kind
    _schemes.partners.update(partners)


def swapped(*, inside: bool) -> None:
    """Numbers were handed to `all_to_all`, inside a backward or outside."""
    _schemes.swaps[inside] += 1


def special() -> str:
    """What this rank ever did that replicas do not do; empty for nothing."""
    return _schemes.special


def partners() -> tuple[int, ...]:
    """The other ranks that it was done with; -1 for any."""
    return tuple(sorted(_schemes.partners))


def swaps() -> tuple[int, ...]:
    """How often `all_to_all` carried numbers outside of backwards, and inside; empty for never."""
    return tuple(_schemes.swaps) if any(_schemes.swaps) else ()


def replicas(group: int) -> bool:
    """Whether nothing else was done with the other ranks of a group; of the default one, with
    any."""
    if not _schemes.special:
        return True
    return group > 0 and _schemes.partners.isdisjoint({-1, *process_groups.others(group)})
