"""How far copies that differ are from each other."""

from __future__ import annotations

from ...events import Sketch
from .replicas import Divergence, Replicas


def distances(group: Replicas, found: Divergence) -> dict[int, float]:
    """By step at which copies differ: the largest distance of two copies over their norm, where it
    was measured."""
    kind = found.kind
    steps = set(found.keys) if found.point == "step" else None
    end = max(m.last_step for m in group.members.values()) + 1
    sketches: dict[int, dict[int, Sketch]] = {}
    for number, member in group.members.items():
        for event in member.of(Sketch, kind=kind):
            within = event.step >= found.first if steps is None else event.step in steps
            if within or event.step == end:
                sketches.setdefault(event.step, {})[number] = event
    # Ranks that agree have no distance: it takes one rank of two groups.
    sides = [set(side) for side in found.split]
    found_distances = {
        step: _distance(list(seen.values()))
        for step, seen in sorted(sketches.items())
        if sum(not side.isdisjoint(seen) for side in sides) > 1
    }
    if not found_distances.get(end, 1.0):
        del found_distances[end]  # made equal after the last step
    return found_distances


def _distance(sketches: list[Sketch]) -> float:
    first = sketches[0]
    widest = max(
        sum((a - b) ** 2 for a, b in zip(first.bins, other.bins, strict=False)) ** 0.5
        for other in sketches[1:]
    )
    norm = max(s.norm for s in sketches)
    return widest / norm if norm else 0.0
