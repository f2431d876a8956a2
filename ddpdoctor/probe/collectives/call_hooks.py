"""The hooks that fire around collective and point-to-point calls, and what they pass on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...events.operations import operation
from ..recording.hooks import Hook


@dataclass(slots=True)
class Call:
    """A collective or point-to-point call, about to be made.

    Attributes:
        op: its name in records, see `collectives.KINDS`.
        group: number of the process group, -1 if unknown.
        tensors: the tensors passed in. Watchers must not keep them.
        reduction: torch's reduce operation, None if the call does not reduce.
        peers: global ranks on the other side of a point-to-point call, -1 for any.
        messages: of a point-to-point call, for each message its function (`isend`), the peer and
            the tensor. Watchers must not keep these.
        outputs: the tensors that the results are written to, where these are others.
    """

    op: str
    group: int
    p2p: bool
    tensors: tuple[Any, ...]
    reduction: Any = None
    peers: tuple[int, ...] = ()
    messages: tuple[tuple[str, int, Any], ...] = ()
    outputs: tuple[Any, ...] = ()

    @property
    def carries_values(self) -> bool:
        """Whether it is a collective of tensors, not a barrier."""
        return operation(self.op).carries

    @property
    def reduces_by(self) -> str:
        """The reduce operation as a word: `SUM`, `AVG`, `PREMUL_SUM`."""
        return reduction_name(self.reduction)

    @property
    def gathers(self) -> bool:
        """Whether it gathers tensors, leaving the one passed in as it is."""
        kind = operation(self.op)
        return kind.gathers and not kind.objects


@dataclass(slots=True)
class Issued:
    """An asynchronous call has returned: the one of the last `Call`.

    Attributes:
        number: its number in the ring.
        works: torch's `Work` objects; each stands for a part of the call.
    """

    number: int
    works: tuple[Any, ...]


def reduction_name(reduction: Any) -> str:
    """torch's reduce operation as a word: `SUM`, `AVG`, `PREMUL_SUM`."""
    text = str(getattr(reduction, "name", None) or reduction)
    return text.rpartition(".")[2].strip("<>").split(":")[0]


called: Hook[Call] = Hook("called")

issued: Hook[Issued] = Hook("issued")
call_failed: Hook[tuple[int, BaseException]] = Hook("call failed")
"""A call raised: its number in the ring, and the exception."""
waited: Hook[float] = Hook("waited")
"""A collective, or the wait for one, has returned after so many seconds."""
