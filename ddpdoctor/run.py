"""One run, all ranks joined, read-only, with the questions that checks ask of it."""

from __future__ import annotations

import signal as signals
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePath
from typing import TypeVar

import msgspec

from .events import (
    Event,
    ExceptionRaised,
    GroupReady,
    MonitorStarted,
    NotObserved,
    OptimizerSeen,
    Pace,
    ProcessEnded,
    ProcessStarted,
    RankExiting,
    RankStarted,
    Site,
    StallOver,
    StallSeen,
    StepDone,
    Stopped,
    ThreadsSeen,
    TorchLoaded,
    Wrapped,
)
from .findings import Location
from .joining import end_of, joined_info, of_one_world, stopped_in
from .naming import names_of, title_of
from .numbering import numbered_alike
from .ranks import equal_ranks, fold_ranks, groups_text, odd_ones, ranks_do, ranks_text, unfolded
from .ring import Call, Phase, Ring, State, read_ring
from .runfolder import Lines, RunFolder, RunInfo
from .worlds import under_the_launchers_numbers

__all__ = [
    "Call", "Facts", "Phase", "Rank", "Recording", "Ring", "Run", "State", "equal_ranks",
    "fold_ranks", "groups_text", "load", "odd_ones", "ranks_do", "ranks_text", "shorten",
    "stopped_in", "title_of", "unfolded",
]  # fmt: skip

E = TypeVar("E", bound=Event)
F = TypeVar("F", bound="Facts")

UNKNOWN = RunInfo(schema_version=0, id="", command=[], started_at="", tool_version="")


class Facts:
    """Events of one source, by kind, in the order they were recorded."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Event], list[Event]] = {}
        self.last: Event | None = None
        self.unreadable = 0
        self.torn = False
        self.refused = ""

    def add(self, event: Event) -> None:
        kind = type(event)
        try:
            self._by_kind[kind].append(event)
        except KeyError:
            self._by_kind[kind] = [event]
        self.last = event

    def replace_events(self, by: Callable[[Event], Event]) -> None:
        self._by_kind = {kind: [by(e) for e in told] for kind, told in self._by_kind.items()}

    def of(self, kind: type[E]) -> list[E]:
        """All events of a kind, oldest first."""
        return self._by_kind.get(kind, [])  # type: ignore[return-value]

    def first(self, kind: type[E]) -> E | None:
        return next(iter(self.of(kind)), None)

    def latest(self, kind: type[E]) -> E | None:
        events = self.of(kind)
        return events[-1] if events else None

    def __iter__(self) -> Iterator[Event]:
        """All events in order of time."""
        every = [e for events in self._by_kind.values() for e in events]
        return iter(sorted(every, key=lambda e: e.at))


class Rank(Facts):
    """What one rank recorded, and what its node's monitor saw of its process.

    Attributes:
        twins: other processes that claimed the same rank.
        stalled: the run stood still when it ended.
        as_recorded: with the numbers of its own world, where those are others than the run's.
        path: its event file; numbers: the run's of the ranks in its ring, None where they are.
        alive: its end is not on record and its process is there still; known to a post-mortem.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.ended: ProcessEnded | None = None
        self.stopped: Stopped | None = None
        self.twins: list[Rank] = []
        self.stalled = self.alive = False
        self.as_recorded: Rank | None = None
        self._ring: tuple[Path | None, Ring | None] = (None, None)
        self.path: Path | None = None
        self.numbers: dict[int, int] | None = None
        self._sites: dict[int, Location] = {}

    def add(self, event: Event) -> None:
        super().add(event)
        if isinstance(event, Site):
            self._sites[event.id] = Location(
                shorten(event.file, self.cwd), event.line, event.function, event.text
            )

    @property
    def ring(self) -> Ring | None:
        """Its last calls and where it is; read when asked for, then the same until looked again."""
        if self._ring[0] != self.path and self.path is not None:
            read = read_ring(self.path.with_suffix(".ring"), self.numbers)
            mine = read and self.started and read.pid == self.started.pid
            self._ring = self.path, read if mine else None
        return self._ring[1]

    def look_again(self) -> None:
        self._ring = None, self._ring[1]

    @property
    def started(self) -> RankStarted | None:
        return self.first(RankStarted)

    @property
    def cwd(self) -> str:
        return self.started.cwd if self.started else ""

    @property
    def node(self) -> str:
        return self.started.node if self.started else ""

    def location(self, site: int) -> Location | None:
        """The user's line behind a site number; None for -1 and for unknown ones."""
        return self._sites.get(site)

    def location_of(self, file: str, line: int) -> Location:
        """A line given by its path, with its text where this rank recorded it."""
        path = shorten(file, self.cwd)
        known = (s for s in self._sites.values() if (s.file, s.line) == (path, line))
        return next(known, Location(path, line))

    def names_of(self, wrapped: Wrapped) -> tuple[str, str]:
        """What the program calls the wrapper, and what it was given; empty for unknown."""
        return names_of(self, wrapped)

    def wall(self, at: float) -> float:
        """A time on this rank's clock as seconds since the epoch, comparable between nodes."""
        known = self.started or self.ended
        return at - known.at + known.wall if known else at

    @property
    def default_group(self) -> GroupReady | None:
        """The default process group, once this rank has it."""
        return next((g for g in self.of(GroupReady) if g.group == 0), None)

    def steps_of(self, optimizer: int) -> int:
        """Steps of one optimizer."""
        told = max((e.step + 1 for e in self.of(StepDone) if e.optimizer == optimizer), default=0)
        # The last ones may not be on record; the ring counts those of all optimizers.
        only = len(self.of(OptimizerSeen)) == 1 and self.ring is not None
        return max(told, self.ring.step) if only and self.ring else told

    @property
    def steps(self) -> int:
        """Optimizer steps, of the optimizer that took the most."""
        known = {e.optimizer for e in self.of(OptimizerSeen)}
        known |= {e.optimizer for e in self.of(StepDone)}
        return max(map(self.steps_of, known), default=0)

    @property
    def exception(self) -> ExceptionRaised | None:
        """The exception that ended this rank's program, also by a bad status after it caught it."""
        every = self.of(ExceptionRaised)
        uncaught = [e for e in every if not e.caught]
        end = self.ended or self.latest(RankExiting)
        raised = uncaught or (every if end and end.status else [])
        return raised[-1] if raised else None

    @property
    def exit_code(self) -> int | None:
        if self.ended and (self.ended.status, self.ended.signal) != (None, None):
            return self.ended.status
        leaving = self.latest(RankExiting)
        status = leaving.status if leaving else None
        return status or (1 if self.exception else status)

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended the process."""
        number = self.ended.signal if self.ended else None
        try:
            return signals.Signals(number).name if number is not None else None
        except ValueError:
            return f"signal {number}"

    @property
    def state(self) -> str:
        """`finished | failed | killed | hung | running | lost`."""
        by_doctor = self.stopped and self.stopped.by == "doctor"
        if self.ended and self.ended.signal is not None:
            return "hung" if self.stalled or by_doctor else "killed"
        if self.ended and self.ended.status is not None:
            return "failed" if self.ended.status else "finished"
        leaving = self.latest(RankExiting)
        if self.exception or (leaving and leaving.status):
            return "failed"
        if leaving or self.ended:  # or gone without a word, and nobody could wait for it
            return "finished" if leaving else "killed"
        return "running" if self.alive else "hung" if by_doctor else "lost"

    @property
    def device(self) -> str:
        wrapped = self.latest(Wrapped)
        return wrapped.device if wrapped and wrapped.device else "cpu"

    def step_time(self) -> float | None:
        """Median seconds of a step, the first few left out; None after one step, which began with
        the program."""
        times = [e.wall_s / max(1, e.count) for e in self.of(StepDone)]
        return statistics.median(times[3:] or times[1:]) if times[1:] else None

    @property
    def waits_on_gpu(self) -> bool:
        """Whether it waits for other ranks where the host does not see it."""
        nccl = any("nccl" in group.backend for group in self.of(GroupReady))
        return nccl and self.device.startswith("cuda")

    def waiting(self) -> float | None:
        """Median seconds of a step in collectives and for other ranks; None where not seen."""
        waited = [e.waited_s for e in self.of(Pace)]
        return statistics.median(waited) if waited and not self.waits_on_gpu else None


class Run:
    """All ranks of one attempt of one run.

    Attributes:
        ranks: by global rank. `missing` are those of the world that left no record.
        nodes: what each node's monitor recorded, by node rank.
        others: processes that were ranks of other groups of the same command.
        now: the monotonic time of a look at a run that goes on; None for one that is over.
    """

    others: tuple[Rank, ...] = ()
    now: float | None = None

    def __init__(
        self, info: RunInfo, ranks: dict[int, Rank], nodes: dict[int, Facts], attempt: int = 0
    ) -> None:
        self.info = info
        self.ranks = numbered_alike(under_the_launchers_numbers(dict(sorted(ranks.items()))))
        self.nodes = nodes
        self.attempt = attempt

    @cached_property
    def world_size(self) -> int:
        said = [r.started.world_size for r in self.ranks.values() if r.started]
        ready = [len(g.ranks) for r in self.ranks.values() if (g := r.default_group)]
        told = [e.world_size for e in self._processes()]
        asked = 0 if self.others else self.info.world_size
        return max(asked, len(self.ranks), *said, *ready, *told)

    @property
    def missing(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self.ranks]

    @property
    def unrecorded(self) -> list[int]:
        """Ranks that were seen to run from outside and that left no record."""
        ends = (e for node in self.nodes.values() for e in node.of(ProcessEnded))
        seen = {e.rank for e in ends if e.attempt == self.attempt}
        seen |= {e.rank for e in self._processes()}
        return sorted(seen - self.ranks.keys() - {other.rank for other in self.others})

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
        """Why the probe did not look at something a check needs, where it said so."""
        return next((e.reason for e in self._each(NotObserved) if e.check == check), None)

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
        """`completed | failed | hung | killed | incomplete` (see CONTRACT)."""
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


def shorten(file: str, cwd: str) -> str:
    """A path as the user would type it in `cwd`."""
    path = PurePath(file)
    if cwd and path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    return file


class Recording:
    """A run folder being read: call `refresh` as often as it may have grown."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._files: dict[object, tuple[Lines, Facts]] = {}

    def refresh(self, attempt: int = 0) -> Run:
        """What the folder says now of one attempt."""
        records: dict[int, list[Rank]] = {}
        for number, path in self.folder.rank_files(attempt):
            if (rank := self._follow(path, Rank(number))) is None:
                continue
            rank.path = path
            rank.look_again()
            records.setdefault(number, []).append(rank)
        nodes = {
            n: facts
            for n, path in self.folder.node_files()
            if (facts := self._follow(path, Facts())) is not None
        }
        for one in (r for several in records.values() for r in several):
            one.ended, one.stopped = end_of(one, nodes.values(), attempt)
        info = self.folder.read_info() or UNKNOWN
        if attempt != self.folder.attempts()[-1]:  # what stands there is how the last one ended
            info = msgspec.structs.replace(info, outcome=None, exit_code=None)
        ranks, others = of_one_world(records)
        run = Run(info, ranks, nodes, attempt)
        run.others = others
        for rank in run.ranks.values():
            rank.stalled = run.stall is not None
        return run

    def _follow(self, path: Path, fresh: F) -> F | None:
        """Everything in a file so far; None where it is no file of ours (a link, a folder)."""
        lines, facts = self._files.setdefault(path, (Lines(path), fresh))
        for event in lines.events():
            facts.add(event)
        facts.unreadable, facts.torn = lines.unreadable, lines.torn
        facts.refused = f"{path.name} may not be read ({lines.refused})" if lines.refused else ""
        return None if lines.foreign else facts  # type: ignore[return-value]


def load(folders: Sequence[RunFolder], attempt: int = 0) -> Run:
    """One run from its folders, one per node."""
    runs = [Recording(folder).refresh(attempt) for folder in folders]
    ranks: dict[int, Rank] = {}
    nodes: dict[int, Facts] = {}
    for run in runs:
        ranks.update(run.ranks)
        for number, node in run.nodes.items():
            # Without --node-rank every node thinks it is the first.
            nodes[number if number not in nodes else max(nodes) + 1] = node
    joined = Run(joined_info(runs), ranks, nodes, attempt)
    joined.others = tuple(p for run in runs for p in run.others)
    return joined
