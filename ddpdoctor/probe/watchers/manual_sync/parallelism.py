"""Do the ranks split a model between them, rather than each train a replica?

Replicas exchange gradients or parameters. Point-to-point calls, `all_to_all` and collectives inside
the backward are signs of pipeline, expert or tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...collectives.process_groups import ProcessGroups
from ...recording.watcher import Watcher

POINT_TO_POINT = "point-to-point"
ALL_TO_ALL = "all-to-all"
IN_BACKWARD = "in backward"


class Parallelism(Watcher):
    """What this rank has done since the start that replicas do not do.

    Attributes:
        special: `all-to-all`, `point-to-point` or `in backward`; empty if nothing.
        partners: the other ranks involved; -1 stands for any rank.
        sends: it has sent to or received from another rank, as the stages of a pipeline do.
        all_to_alls: `all_to_all` calls with floating-point tensors, outside and inside backwards.
    """

    lost = "signs of pipeline, expert or tensor parallelism"

    def __init__(self) -> None:
        self.special = ""
        self.sends = False
        self._partners: set[int] = set()
        self.all_to_alls = [0, 0]

    def seen(self, kind: str, partners: Iterable[int]) -> None:
        """Note a call of one of the kinds above with these ranks."""
        self.sends |= kind == POINT_TO_POINT
        # Pipelines send activations, but so do plain programs (a loss to rank 0): the weakest sign.
        if kind != POINT_TO_POINT or not self.special:
            self.special = kind
        self._partners.update(partners)

    def all_to_all_called(self, *, inside: bool) -> None:
        """Count an `all_to_all` of floating-point tensors, inside a backward or outside."""
        self.all_to_alls[inside] += 1

    def partners(self) -> tuple[int, ...]:
        """The other ranks with which such calls were made; -1 stands for any rank."""
        return tuple(sorted(self._partners))

    def all_to_all_calls(self) -> tuple[int, ...]:
        """Counts of `all_to_all` calls outside and inside backwards; empty if there were none."""
        return tuple(self.all_to_alls) if any(self.all_to_alls) else ()

    def holds_replicas(self, group: int) -> bool:
        """Whether this rank made no such call with other ranks of the group (for the default group:
        with any rank)."""
        if not self.special:
            return True
        return group > 0 and self._partners.isdisjoint(
            {-1, *ProcessGroups.current.other_members(group)}
        )
