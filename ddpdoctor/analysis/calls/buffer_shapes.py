"""Buffers of a model that have different shapes on the ranks when DDP broadcasts them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...events import SentBuffers, Tensor, Wrapped
from ...run import Rank, Run
from ...run.steps import total_steps
from .call_logs import call_logs

Buffers = tuple[Tensor, ...]


@dataclass(frozen=True)
class BufferMismatch:
    """The first forward in which the shapes of a model's buffers differ.

    Attributes:
        kind: the class of the model.
        root: the rank whose buffers DDP broadcasts.
        sent: the buffers that each rank passes to DDP.
        event: the record of a rank whose shapes changed; rank: one that differs from the root.
    """

    kind: str
    root: int
    sent: dict[int, Buffers]
    event: SentBuffers
    rank: Rank

    @property
    def culprits(self) -> tuple[int, ...]:
        return tuple(r for r, b in self.sent.items() if _layout(b) != _layout(self.sent[self.root]))

    def shapes(self, rank: int) -> dict[str, str]:
        """Name to shape (`12x12`) of a rank's buffers that differ on another rank, or are missing
        there."""
        others = [{b.name: b.shape for b in buffers} for buffers in self.sent.values()]
        return {
            b.name: "x".join(map(str, b.shape)) or "1"
            for b in self.sent[rank]
            if any(o.get(b.name) != b.shape for o in others)
        }


def buffer_mismatches(run: Run) -> Iterator[BufferMismatch]:
    """One for every model whose buffers have different shapes on the ranks."""
    known = call_logs(run)
    models: dict[object, dict[int, tuple[Rank, Wrapped]]] = {}
    for rank in run.ranks.values():
        for wrapped in rank.of(Wrapped):
            if (key := known.key(rank, wrapped.group)) is not None:
                models.setdefault((key, wrapped.model), {})[rank.rank] = (rank, wrapped)
    for members in models.values():
        parameters = {tuple((p.name, p.shape) for p in w.parameters) for _, w in members.values()}
        if len(members) > 1 and len(parameters) == 1 and (found := _first(members)) is not None:
            yield found


def _first(members: dict[int, tuple[Rank, Wrapped]]) -> BufferMismatch | None:
    """The first forward in which they differ, of those that all ranks are known to have started."""
    reported = {
        n: [e for e in r.of(SentBuffers) if e.model == w.model] for n, (r, w) in members.items()
    }
    reached = min(total_steps(rank) for rank, _ in members.values())
    root = min(members)
    for event in sorted((e for es in reported.values() for e in es), key=lambda e: e.forward):
        if event.total >= reached:
            return None
        now = {n: _sent(w, reported[n], event.forward) for n, (_, w) in members.items()}
        culprits = [n for n in now if _layout(now[n]) != _layout(now[root])]
        if culprits:
            rank, wrapped = members[culprits[0]]
            return BufferMismatch(wrapped.kind, root, now, event, rank)
    return None


def _sent(wrapped: Wrapped, reported: list[SentBuffers], forward: int) -> Buffers:
    """The buffers that a rank passes to DDP in a forward."""
    last = [e.buffers for e in reported if e.forward <= forward]
    return last[-1] if last else tuple(b for b in wrapped.buffers if not b.ignored)


def _layout(buffers: Buffers) -> tuple[tuple[str, int], ...]:
    return tuple((b.dtype, math.prod(b.shape)) for b in buffers)
