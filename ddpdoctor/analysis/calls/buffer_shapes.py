"""Buffers of a model that are not the same ones, or have other shapes, on some ranks when DDP
broadcasts them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...events import SentBuffers, Tensor, Wrapped
from ...run import Location, Rank, Run
from ...run.steps import total_steps
from ...storage.call_ring import Phase
from .call_logs import call_logs

Buffers = tuple[Tensor, ...]


_IN_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True)
class BufferMismatch:
    """The first forward in which a model's buffers, or their shapes, differ.

    Attributes:
        kind: the class of the model.
        root: the rank whose buffers DDP broadcasts.
        sent: the buffers that each rank passes to DDP.
        event: the record of a rank whose buffers changed.
        rank: one that differs from the root, which may be the one with that record.
        last: the last step for which it holds.
        made: the line that made the module of a buffer that ranks lack; None if unknown.
    """

    kind: str
    root: int
    sent: dict[int, Buffers]
    event: SentBuffers
    rank: Rank
    last: int
    made: Location | None

    @property
    def lacking(self) -> dict[int, list[str]]:
        """By rank, the buffers of other ranks that it does not have."""
        names = dict.fromkeys(b.name for buffers in self.sent.values() for b in buffers)
        own = {r: {b.name for b in buffers} for r, buffers in self.sent.items()}
        rows = {r: [name for name in names if name not in mine] for r, mine in own.items()}
        return {r: missing for r, missing in rows.items() if missing}

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that lack buffers; where none does, those whose shapes are not the root's."""
        root = _layout(self.sent[self.root])
        differ = tuple(r for r, b in self.sent.items() if _layout(b) != root)
        return tuple(self.lacking) or differ

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
    """One for every model whose buffers, or their shapes, differ between ranks."""
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
    root = min(members)
    found: BufferMismatch | None = None
    for event in sorted((e for es in reported.values() for e in es), key=lambda e: e.forward):
        by = _recorder(members, reported, event)
        if not all(rank is by or _came_to(rank, event) for rank, _ in members.values()):
            break
        now = {n: _sent(w, reported[n], event.forward) for n, (_, w) in members.items()}
        culprits = [n for n in now if _layout(now[n]) != _layout(now[root])]
        if culprits and found is None:
            rank, wrapped = members[culprits[0]]
            made = by.location(event.made) if event.made >= 0 else None
            last = max(event.step, min(total_steps(r) for r, _ in members.values()) - 1)
            found = BufferMismatch(wrapped.kind, root, now, event, rank, last, made)
        elif found is not None and not culprits:
            return replace(found, last=max(found.event.step, event.step - 1))
    return found


def _recorder(
    members: dict[int, tuple[Rank, Wrapped]],
    reported: dict[int, list[SentBuffers]],
    event: SentBuffers,
) -> Rank:
    """The rank that recorded an event."""
    return next(members[n][0] for n, events in reported.items() if any(e is event for e in events))


def _came_to(rank: Rank, event: SentBuffers) -> bool:
    """Whether a rank is known to have come to the forward of an event, or past it."""
    if rank.ring is not None and rank.ring.step == event.total:
        return total_steps(rank) > event.total or rank.ring.phase in _IN_STEP
    return total_steps(rank) > event.total


def _sent(wrapped: Wrapped, reported: list[SentBuffers], forward: int) -> Buffers:
    """The buffers that a rank passes to DDP in a forward."""
    last = [e.buffers for e in reported if e.forward <= forward]
    return last[-1] if last else tuple(b for b in wrapped.buffers if not b.ignored)


def _layout(buffers: Buffers) -> tuple[tuple[str, int], ...]:
    return tuple((b.dtype, math.prod(b.shape)) for b in buffers)
