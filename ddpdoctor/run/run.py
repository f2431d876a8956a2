"""One run, all ranks joined, read-only, with the questions that checks ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from ..events import (
    Event,
    GroupReady,
    MonitorStarted,
    NotObserved,
    ProcessEnded,
    ProcessStarted,
    StallOver,
    StallSeen,
    StepDone,
    ThreadsSeen,
    TorchLoaded,
)
from ..storage.run_folder import LEFT_BEHIND, RunInfo
from .align_numbers import numbered_alike
from .location import Location
from .phrases import Fold
from .rank import E, Facts, Rank
from .subgroup_ranks import under_the_launchers_numbers


class Run:
    """All ranks of one attempt of one run.

    Attributes:
        ranks: by global rank. `missing` are those of the world that left no record.
        nodes: what each node's monitor recorded, by node rank.
        others: processes that were ranks of other groups of the same command.
        folded: ranks of a large run that did what some in `ranks` did, and are not among these; of
            their own they have what they read of the data. folds: which did as which.
        probe_error: why some process could not load the probe, empty where none is known.
        now: the monotonic time of a look at a run that goes on; None for one that is over.
    """

    others: tuple[Rank, ...] = ()
    now: float | None = None
    probe_error: str = ""
    folded: Mapping[int, Rank] = MappingProxyType({})
    folds: Sequence[Fold] = ()

    def __init__(
        self, info: RunInfo, ranks: dict[int, Rank], nodes: dict[int, Facts], attempt: int = 0
    ) -> None:
        self.info = info
        self.ranks = numbered_alike(under_the_launchers_numbers(dict(sorted(ranks.items()))))
        self.nodes = nodes
        self.attempt = attempt

    @property
    def left_behind(self) -> bool:
        """Whether the doctor did not examine it, and read only what it left behind."""
        return self.info.launcher.startswith(LEFT_BEHIND)

    @cached_property
    def world_size(self) -> int:
        claimed = [r.started.world_size for r in self.ranks.values() if r.started]
        ready = [len(g.ranks) for r in self.ranks.values() if (g := r.default_group)]
        started = [e.world_size for e in self._processes()]
        asked = 0 if self.others else self.info.world_size
        return max(asked, len(self.everyone), *claimed, *ready, *started)

    @cached_property
    def everyone(self) -> dict[int, Rank]:
        """`ranks` and `folded`."""
        return dict(sorted({**self.ranks, **self.folded}.items()))

    @property
    def missing(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self.everyone]

    @cached_property
    def unrecorded(self) -> list[int]:
        """Ranks that were seen to run from outside and that left no record."""
        ends = (e for node in self.nodes.values() for e in node.of(ProcessEnded))
        seen = {e.rank for e in ends if e.attempt == self.attempt}
        seen |= {e.rank for e in self._processes()}
        return sorted(seen - self.everyone.keys() - {other.rank for other in self.others})

    def _processes(self) -> list[ProcessStarted]:
        every = (e for node in self.nodes.values() for e in node.of(ProcessStarted))
        return [e for e in every if e.attempt == self.attempt]

    @cached_property
    def started(self) -> float:
        """When the first rank started, on the clock of `Rank.wall`."""
        return min((r.started.wall for r in self.ranks.values() if r.started), default=0.0)

    @property
    def torch(self) -> str:
        return next((e.torch for e in self._each(TorchLoaded)), self.info.torch)

    @property
    def backend(self) -> str:
        return next((e.backend for e in self._each(GroupReady) if e.group == 0), "")

    @property
    def store_used_before(self) -> bool:
        """Whether the ranks meet in a store in which an attempt before has left its addresses:
        torchrun lets them use its own, which outlives them."""
        shared = (r.started.environment for r in self.ranks.values() if r.started)
        return self.attempt > 0 and any(
            e.get("TORCHELASTIC_USE_AGENT_STORE") == "True" for e in shared
        )

    def processes(self) -> list[Rank]:
        """Every process that recorded, also those that share a rank, and `others`."""
        every = [p for rank in self.ranks.values() for p in (rank, *rank.twins)]
        return list({id(p): p for p in (*every, *self.others)}.values())

    def _each(self, kind: type[E]) -> Iterator[E]:
        return (e for rank in self.ranks.values() for e in rank.of(kind))

    def by_line(self, kind: type[E], site: str = "site") -> dict[Location, dict[int, E]]:
        """By a line that events name, the first of them on each rank.

        Args:
            site: the field with the number of the line.
        """
        found: dict[Location, dict[int, E]] = {}
        for number, rank in self.ranks.items():
            for event in rank.of(kind):
                if (line := rank.location(getattr(event, site))) is not None:
                    found.setdefault(line, {}).setdefault(number, event)
        return found

    def any(self, kind: type[Event]) -> bool:
        """Whether any rank recorded such an event."""
        return any(rank.of(kind) for rank in self.ranks.values())

    def cores(self, node: str) -> float:
        """Cores that the ranks of a node may use together, 0 where unknown."""
        ranks = [r for r in self.ranks.values() if r.node == node]
        cpus = {c for r in ranks for e in r.of(ThreadsSeen)[-1:] for c in e.cpus}
        known = len(cpus) or max((r.started.cores for r in ranks if r.started), default=0)
        monitors = (n.latest(MonitorStarted) for n in self.nodes.values())
        quotas = [m.cpu_quota for m in monitors if m and m.node == node and m.cpu_quota]
        return min([float(known), *quotas])

    def not_observed(self, check: str) -> str | None:
        """Why the probe skipped what a check needs, None where it did not."""
        reasons = (e.reason for e in self._each(NotObserved) if e.check == check and not e.partly)
        return next(reasons, None)

    def partly_observed(self, check: str) -> str | None:
        """What the probe skipped of what a check looks at, None for nothing."""
        reasons = (e.reason for e in self._each(NotObserved) if e.check == check and e.partly)
        return "; ".join(dict.fromkeys(reasons)) or None

    @cached_property
    def stall(self) -> tuple[StallSeen, float] | None:
        """The monitor's record of a stall that was never over, and when on `Rank.wall`'s clock."""
        if self.now is None and all(r.state == "finished" for r in self.ranks.values()):
            return None  # it ended well, before the monitor could see it go on
        found = []
        for node in self.nodes.values():
            began = node.first(MonitorStarted)
            seen = [e for e in node.of(StallSeen) if e.attempt == self.attempt]
            over = [e.at for e in node.of(StallOver) if e.attempt == self.attempt]
            if began and seen and not any(at > seen[-1].at for at in over):
                found.append((seen[-1], seen[-1].at - began.at + began.wall))
        if self.others:  # of which one may have stood still
            found = [item for item in found if item[1] >= self.started]
        first = min(found, key=lambda item: item[1], default=None)
        return None if first is None or self._went_on(first[0].at) else first

    def _went_on(self, at: float) -> bool:
        """Whether ranks stepped or called after that, so that the stall was none in the end."""
        for rank in self.ranks.values():
            step = rank.latest(StepDone)
            if step is not None and step.at > at:
                return True
            if any(c.began > at for c in (rank.ring.last_calls if rank.ring else ())):
                return True
        return False

    def outcome(self) -> str:
        """How the run ended: `completed`, `failed`, `hung`, `killed`, or `incomplete` where no end
        is on record."""
        if self.info.outcome:
            return self.info.outcome
        if self.stall is not None:
            return "hung"
        states = [r.state for r in self.ranks.values()]
        if not states or "lost" in states or "running" in states or self.missing:
            return "incomplete" if "failed" not in states else "failed"
        return next((s for s in ("hung", "failed", "killed") if s in states), "completed")

    def training_ranks(self) -> list[Rank]:
        """The ranks that took optimizer steps."""
        return [r for r in self.ranks.values() if r.of(StepDone)]
