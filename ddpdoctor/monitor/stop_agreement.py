"""How ranks learn, without talking to each other, that they must stop because of a fault.

A program that says `raise_on` has its ranks count their calls in small files of the run folder.
After each of the first calls, and after calls 16, 32, ..., every rank waits a moment for the
monitor, which judges once all have come that far: a fault stops all ranks at that very call. In
between, the monitor judges now and then and names a call that no rank has reached yet. No rank goes
on alone, and none waits for ever.
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
from ..report.findings import Confidence, Finding, Report, Severity
from ..run import Run
from ..storage.run_folder import RunFolder, write_private
from ..storage.safe_fd import mapped

GATHER_S = 3.0
"""So long after the last one that came, no further rank is waited for in this folder."""
LOOK_S = 2.0
LOOK_SHARE = 10
"""A look that took long is not repeated before ten times that."""

AHEAD_S = 1.0
"""The call to stop at lies at least this far ahead of the fastest rank."""

MEETINGS_AT_FIRST = 8
"""After so many calls, one by one: a run may be over before the next power of two."""

END_OF_BLOCK = 1 << 40
"""As the number of a call: the end of a `with` block, where all ranks wait."""
LEFT = 1 << 41
"""As a count: this rank's call raised; nobody is to wait for it."""

_COUNT = struct.Struct("<q")

S = TypeVar("S", bound=msgspec.Struct)


class Request(msgspec.Struct, frozen=True):
    """What the program asked for; the first rank to ask decides."""

    raise_on: str
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """Stop after the first call numbered `at_call` or later."""

    at_call: int
    findings: tuple[Finding, ...]


class Looked(msgspec.Struct, frozen=True):
    """The monitor has judged everything up to that call of every rank."""

    call: int


class Place:
    """The files of one run folder that ranks and monitor meet in."""

    def __init__(self, run: Path) -> None:
        self.path = run / "verdict"
        self.request = self.path / "request.json"
        self.verdict = self.path / "verdict.json"
        self.looked = self.path / "looked.json"

    def ask(self, request: Request) -> None:
        """Ask for verdicts; what another rank asked before stays.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not self.request.exists():
            write_private(self.request, msgspec.json.encode(request))

    def counter(self, rank: int) -> Counter:
        return Counter(self.path / f"rank-{rank}.calls")

    def counts(self) -> dict[int, int]:
        """Calls of every rank that counts, by rank."""
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
    """The monitor's side, for one attempt. Call `look` as often as it ticks."""

    def __init__(self, folder: RunFolder, attempt: int = 0) -> None:
        self.attempt = attempt
        self._folder = folder
        self._place = Place(folder.attempt_path(attempt))
        self._next_look = 0.0
        self._before: dict[object, Finding] = {}
        self._rate = _Rate()
        self.decided = False

    @property
    def asked(self) -> bool:
        return not self.decided and self._place.request.exists()

    def look(self, run: Run | None, refresh: Callable[[], Run]) -> None:
        """Judge, where somebody asked for it.

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
        # What one look says may be half a step, written by some ranks and not yet by others.
        proven = {_key(f): f for f in found if f.confidence is Confidence.PROVEN}
        stable = [f for key, f in proven.items() if key in self._before]
        self._before = proven
        if stable:
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
    """Calls a second, of late."""

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
    """Whether ranks wait for the monitor after this call: the first ones and the powers of two."""
    return 0 < call <= MEETINGS_AT_FIRST or (call > 0 and call & (call - 1) == 0)


def _all_here(run: Run, counting: int) -> bool:
    """Whether every rank that records in this folder counts; those of other nodes may not."""
    started = [rank.started.wall for rank in run.ranks.values() if rank.started]
    return counting >= max(1, run.world_size) or (
        counting >= len(started) > 0 and time.time() - max(started) > GATHER_S
    )


def _key(finding: Finding) -> object:
    place = finding.location
    return finding.code, finding.subjects, (place.file, place.line) if place else None


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
