"""The hooks around collective and point-to-point calls, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...events.operations import operation
from ..recording.hooks import Hook


@dataclass(slots=True)
class Call:
    """A collective or point-to-point call, about to be made.

    Attributes:
        op: as in `collectives.KINDS`; group: its number, -1 where unknown.
        tensors: what goes in. Watchers must not keep them.
        reduction: torch's own reduce operation, None where there is none.
        peers: global ranks on the other side of a point-to-point call, -1 for any.
    """

    op: str
    group: int
    p2p: bool
    tensors: tuple[Any, ...]
    reduction: Any = None
    peers: tuple[int, ...] = ()

    @property
    def carries_values(self) -> bool:
        """Whether it is a collective of tensors, and no barrier."""
        return operation(self.op).carries

    @property
    def gathers(self) -> bool:
        """Whether it leaves what a rank hands over as it is."""
        kind = operation(self.op)
        return kind.gathers and not kind.objects


@dataclass(slots=True)
class Issued:
    """An asynchronous call was made, the last one that was told of as a `Call`.

    Attributes:
        number: in the ring.
        works: torch's own, each ends a part of it.
    """

    number: int
    works: tuple[Any, ...]


called: Hook[Call] = Hook("called")

issued: Hook[Issued] = Hook("issued")
call_failed: Hook[tuple[int, BaseException]] = Hook("call failed")
"""A call raised: its number in the ring, and what."""
waited: Hook[float] = Hook("waited")
"""The rank comes out of a collective that took so many seconds."""
