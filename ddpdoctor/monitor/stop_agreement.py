"""How ranks agree, without communication, to stop after the same call because of a fault.

With `raise_on`, the ranks count their calls in small files of the run folder. After each of the
first calls, and after calls 16, 32, ..., every rank waits a moment for the monitor, which diagnoses
the run when all ranks have come that far: a fault stops all of them after that call. In between,
the monitor diagnoses the run now and then, and stops the ranks after a call that none has reached
yet. No rank continues alone, and none waits forever.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..events.json_text import UNREADABLE
from ..report import registry
from ..report.diagnose import diagnose
from ..report.findings import Finding, Report, Severity
from ..run import Run
from ..storage.run_folder import RunFolder, write_private
from ..storage.safe_fd import mapped
from .findings_so_far import SeenTwice

GATHER_S = 3.0
"""How long after the last rank has started further ranks are waited for in this folder."""
LOOK_S = 2.0
LOOK_SHARE = 10
"""A diagnosis is not repeated before `LOOK_S`, nor before this many times what it took, so that it
takes little of a core."""

AHEAD_S = 1.0
"""The call to stop after is at least this far ahead of the fastest rank, so that no rank has passed
it when it reads the verdict."""

MEETINGS_AT_FIRST = 8
"""Ranks wait after each of this many first calls: a short run may end before a power of two."""

END_OF_BLOCK = 1 << 40
"""The call number that stands for the end of a `with` block, where all ranks wait."""
LEFT = 1 << 41
"""The count of a rank whose call raised: no rank waits for it."""

_COUNT = struct.Struct("<q")

S = TypeVar("S", bound=msgspec.Struct)


class Request(msgspec.Struct, frozen=True):
    """The options of the program; those of the first rank to ask count."""

    raise_on: str
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """Stop after the first call numbered `at_call` or later."""

    at_call: int
    findings: tuple[Finding, ...]


class Looked(msgspec.Struct, frozen=True):
    """The monitor has diagnosed the run up to this call of every rank."""

    call: int


class Place:
    """The files of a run folder by which ranks and monitor agree."""

    def __init__(self, run: Path) -> None:
        self.path = run / "verdict"
        self.request = self.path / "request.json"
        self.verdict = self.path / "verdict.json"
        self.looked = self.path / "looked.json"

    def ask(self, request: Request) -> None:
        """Ask for verdicts; a request that another rank made before stays.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not self.request.exists():
            write_private(self.request, msgspec.json.encode(request))

    def counter(self, rank: int) -> Counter:
        return Counter(self.path / f"rank-{rank}.calls")

    def counts(self) -> dict[int, int]:
        """The number of calls so far, by rank."""
        found = {}
        for path in self.path.glob("rank-*.calls"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and (count := _read_count(path)) is not None:
                found[int(number)] = count
        return found

    def read(self) -> Verdict | None:
        return _read(self.verdict, Verdict)

    def looked_at(self) -> int:
        seen = _read(self.looked, Looked)
        return seen.call if seen else 0


class Counter:
    """A number that one process writes and another reads, through a memory map: no descriptor."""

    def __init__(self, path: Path) -> None:
        self._map = mapped(path, _COUNT.size)

    def set(self, count: int) -> None:
        self._map.raw = _COUNT.pack(count)


class Judge:
    """Decides in the monitor, for one attempt, if ranks must stop; call `look` at each tick."""

    def __init__(self, folder: RunFolder, attempt: int = 0) -> None:
        self.attempt = attempt
        self._folder = folder
        self._place = Place(folder.attempt_path(attempt))
        self._next_look = 0.0
        self._seen = SeenTwice()
        self._rate = _Rate()
        self.decided = False

    @property
    def asked(self) -> bool:
        return not self.decided and self._place.request.exists()

    def look(self, run: Run | None, refresh: Callable[[], Run]) -> None:
        """Diagnose the run if a rank asked for it, and decide when all have to stop.

        Args:
            refresh: reads what has been written since `run` was read.
        """
        if run is None or not self.asked:
            return
        request = _read(self._place.request, Request)
        counts = self._place.counts()
        calling = [count for count in counts.values() if count < LEFT]
        if request is None or not calling:
            return
        fastest = max((count for count in calling if count < END_OF_BLOCK), default=0)
        self._rate.note(fastest)
        waiting = min(calling)
        if (
            _all_here(run, len(counts))
            and is_meeting_point(waiting)
            and waiting > self._place.looked_at()
        ):
            report, found = self._examine(refresh(), request)
            if found:
                self._decide(waiting, report, found)
            write_private(self._place.looked, msgspec.json.encode(Looked(waiting)))
        elif time.monotonic() >= self._next_look:
            self._look_ahead(refresh(), request, fastest)

    def _look_ahead(self, run: Run, request: Request, fastest: int) -> None:
        began = time.monotonic()
        report, found = self._examine(run, request)
        spent = time.monotonic() - began
        self._next_look = time.monotonic() + max(LOOK_S, LOOK_SHARE * spent)
        if stable := self._seen.look(found):
            margin = max(2, int(self._rate.per_second * (AHEAD_S + spent)) + 1)
            self._decide(fastest + margin, report, stable)

    def _examine(self, run: Run, request: Request) -> tuple[Report, list[Finding]]:
        checks = registry.select(request.select, request.ignore)
        report = diagnose(
            run, checks, folder=str(self._folder.path), others=registry.others(checks)
        )
        worst = Severity(request.raise_on).rank
        return report, [f for f in report.findings if f.severity.rank <= worst]

    def _decide(self, call: int, report: Report, found: list[Finding]) -> None:
        write_private(self._folder.findings_path, report.to_json())
        write_private(self._place.verdict, msgspec.json.encode(Verdict(call, tuple(found))))
        self.decided = True


class _Rate:
    """The recent number of calls per second."""

    def __init__(self) -> None:
        self._count, self._at = 0, time.monotonic()
        self.per_second = 0.0

    def note(self, count: int) -> None:
        now = time.monotonic()
        if now - self._at >= 0.1:
            fresh = (count - self._count) / (now - self._at)
            self.per_second = max(fresh, self.per_second / 2)
            self._count, self._at = count, now


def is_meeting_point(call: int) -> bool:
    """Whether ranks wait for the monitor after a call: the first ones and the powers of two."""
    return 0 < call <= MEETINGS_AT_FIRST or (call > 0 and call & (call - 1) == 0)


def _all_here(run: Run, counting: int) -> bool:
    """Whether all ranks that record in this folder count their calls (`counting` ranks do). Ranks
    of other nodes may record elsewhere."""
    started = [rank.started.wall for rank in run.ranks.values() if rank.started]
    return counting >= max(1, run.world_size) or (
        counting >= len(started) > 0 and time.time() - max(started) > GATHER_S
    )


def _read_count(path: Path) -> int | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return int(_COUNT.unpack(content)[0]) if len(content) == _COUNT.size else None


def _read(path: Path, kind: type[S]) -> S | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE):
        return None
