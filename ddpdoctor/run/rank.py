"""What one rank recorded, and what was seen of its process."""

from __future__ import annotations

import signal as signals
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..events import (
    Event,
    ExceptionRaised,
    FlightLog,
    GroupReady,
    Named,
    NodeSilent,
    OptimizerSeen,
    Pace,
    ProcessEnded,
    RankExiting,
    RankStarted,
    Site,
    StackFrame,
    StepDone,
    Stopped,
    ThreadsSeen,
    Wrapped,
)
from ..storage.call_ring import Ring, read_ring
from ..storage.flight_dumps import DumpError, beside, read_dump
from .location import Location, shorten

E = TypeVar("E", bound=Event)

OF_DEVICES = ("nccl", "xccl", "hccl", "ucc", "rccl")
"""Backends whose calls return when they are issued: the device waits for the other ranks, and the
host only where it needs a result."""

ON_HOST = ("gloo", "mpi", "fake", "undefined", "")
"""Backends in whose calls the host waits for the other ranks."""

CLOCK_S = 1.0
"""Seconds by which torch's times and ours may differ."""


class Facts:
    """Events of one source, by kind, in the order they were recorded.

    Attributes:
        shift: seconds that were added to their times, see `clocks`.
    """

    def __init__(self) -> None:
        self.shift = 0.0
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

    def take_from(self, other: Facts, wanted: Callable[[type[Event]], bool]) -> None:
        """Have the very events of another source, of the kinds that are wanted."""
        self._by_kind = {k: events for k, events in other._by_kind.items() if wanted(k)}
        self.last = other.last

    def replace_events(self, by: Callable[[Event], Event]) -> None:
        self._by_kind = {kind: [by(e) for e in events] for kind, events in self._by_kind.items()}

    def of(self, kind: type[E]) -> list[E]:
        """All events of a kind, oldest first."""
        return self._by_kind.get(kind, [])  # type: ignore[return-value]

    def first(self, kind: type[E]) -> E | None:
        return next(iter(self.of(kind)), None)

    def latest(self, kind: type[E]) -> E | None:
        events = self.of(kind)
        return events[-1] if events else None

    def last_of(self, wanted: Callable[[Event], bool]) -> Event | None:
        """The last event that is wanted and that a rank's log shows (`describe`)."""
        found = None
        for kind, events in self._by_kind.items():
            if kind.describe is Event.describe:
                continue
            last = next((e for e in reversed(events) if wanted(e) and e.describe()), None)
            if last is not None and (found is None or last.at >= found.at):
                found = last
        return found

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
        silent: its node was not heard of any more; None where it is.
        alive: its end is not on record and its process is there still; known to a post-mortem.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.ended: ProcessEnded | None = None
        self.stopped: Stopped | None = None
        self.twins: list[Rank] = []
        self.stalled = self.alive = False
        self.silent: NodeSilent | None = None
        self.as_recorded: Rank | None = None
        self._ring: tuple[Path | None, Ring | None] = (None, None)
        self.path: Path | None = None
        self.numbers: dict[int, int] | None = None
        self._dump: tuple[float, list[FlightLog]] = (0.0, [])
        self._sites: dict[int, Location] = {}

    def take_from(self, other: Facts, wanted: Callable[[type[Event]], bool]) -> None:
        super().take_from(other, wanted)
        if isinstance(other, Rank):
            self._sites = other._sites
            self.ended, self.stopped, self.stalled = other.ended, other.stopped, other.stalled

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
            read = read_ring(self.path.with_suffix(".ring"), self.numbers, self.shift)
            mine = read and self.started and read.pid == self.started.pid
            self._ring = self.path, read if mine else None
        return self._ring[1]

    def look_again(self) -> None:
        self._ring = None, self._ring[1]

    def flight_logs(self) -> list[FlightLog]:
        """What torch's flight recorder had, oldest first: as asked in a standstill, and as torch
        left it in the run folder when its watchdog ended a wait."""
        return [*self.of(FlightLog), *self.flight_dump()]

    def flight_dump(self) -> list[FlightLog]:
        """What torch left in the run folder; empty where it did not, or not of this process."""
        path = beside(self.path, self.started.rank) if self.path and self.started else None
        try:
            changed = path.stat().st_mtime if path is not None else 0.0
            if path is not None and changed != self._dump[0]:
                self._dump = changed, self._read_dump(path)
        except (OSError, DumpError):  # still being written, or none of torch's
            return []
        return self._dump[1] if path is not None else []

    def _read_dump(self, path: Path) -> list[FlightLog]:
        dump, began = read_dump(path), self.started
        end = self.wall(self.ended.at) if self.ended is not None else dump.written
        if began is None or not began.wall - CLOCK_S < dump.last < end + CLOCK_S:
            return []  # of another attempt
        before = min(dump.written, end - 1e-3)  # it is written before the process is ended
        return list(dump.logs(before - self.wall(0.0)))

    @property
    def started(self) -> RankStarted | None:
        return self.first(RankStarted)

    @property
    def pid(self) -> int:
        """Of its process; 0 where the start is not on record."""
        return self.started.pid if self.started else 0

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

    def frame_location(self, frame: StackFrame) -> Location:
        """A line of a stack that was taken of the rank."""
        return Location(shorten(frame.file, self.cwd), frame.line, frame.function, frame.text)

    def names_of(self, wrapped: Wrapped) -> tuple[str, str]:
        """The program's names for the wrapper and for the module that was wrapped; empty if
        unknown. They are those on the line of the wrap, unless it has none or wraps several."""
        spot = self.location(wrapped.site) if not wrapped.adopted else None
        wrapper, given = spot.named("DDP", "DistributedDataParallel") if spot else ("", "")
        seen = next((e.name for e in self.of(Named) if e.model == wrapped.model), "")
        alone = sum(w.site == wrapped.site for w in self.of(Wrapped)) == 1
        return (wrapper if wrapper and alone else seen or wrapper), given

    def wall(self, at: float) -> float:
        """A time on this rank's clock as seconds since the epoch, comparable between nodes."""
        known = self.started or self.ended
        return at - known.at + known.wall if known else at

    @property
    def default_group(self) -> GroupReady | None:
        """The default process group, once this rank has it."""
        return next((g for g in self.of(GroupReady) if g.group == 0), None)

    def steps_of(self, optimizer: int) -> int:
        """Steps of one optimizer (`steps.py` defines all ways to count)."""
        recorded = max(
            (e.step + 1 for e in self.of(StepDone) if e.optimizer == optimizer), default=0
        )
        # The last ones may not be on record; the ring counts those of all optimizers.
        only = len(self.of(OptimizerSeen)) == 1 and self.ring is not None
        return max(recorded, self.ring.step) if only and self.ring else recorded

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
        return signal_name(number) if number is not None else None

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
        """Of the model that was wrapped last, or else of the parameters that are trained."""
        wrapped, threads = self.latest(Wrapped), self.latest(ThreadsSeen)
        if wrapped and wrapped.device:
            return wrapped.device
        return threads.device if threads and threads.device else "cpu"

    def step_time(self) -> float | None:
        """Median seconds of a step, the first few left out; None after one step, which began with
        the program. Of several optimizers that step in turn, between two steps of the one that
        takes the most."""
        done = self.of(StepDone)
        steps: Counter[int] = Counter()
        for event in done:
            steps[event.optimizer] += event.count
        most = max(steps, key=lambda n: steps[n], default=-1)
        times, since = [], 0.0
        for event in done:
            since += event.wall_s
            if event.optimizer == most:
                times.append(since / max(1, event.count))
                since = 0.0
        return statistics.median(times[3:] or times[1:]) if times[1:] else None

    @property
    def runs_ahead(self) -> bool:
        """Whether its calls may return before they are done (see `OF_DEVICES`)."""
        backends = (group.backend for group in self.of(GroupReady))
        return any(name in backend for backend in backends for name in OF_DEVICES)

    @property
    def waits_on_gpu(self) -> bool:
        """Whether it waits for other ranks where the host does not see it."""
        if self.device == "cpu":
            return False
        parts = [p for group in self.of(GroupReady) for p in group.backend.split(",")]
        return any(part.rpartition(":")[2] not in ON_HOST for part in parts)

    def waiting(self) -> float | None:
        """Median seconds of a step in collectives and for other ranks; None where not seen."""
        waited = [e.waited_s for e in self.of(Pace)]
        return statistics.median(waited) if waited and not self.waits_on_gpu else None


def signal_name(number: int) -> str:
    """`SIGTERM`, or `signal 77` where it has no name here."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def title_of(rank: Rank, wrapped: Wrapped) -> str:
    """The class of a wrapped model; its name too where several models share the class and the names
    differ."""
    same_class = [
        w for w in rank.of(Wrapped) if w.kind == wrapped.kind and w.model != wrapped.model
    ]
    name = rank.names_of(wrapped)[0]
    unique = same_class and name and all(rank.names_of(other)[0] != name for other in same_class)
    return f"{name} ({wrapped.kind})" if unique else wrapped.kind
