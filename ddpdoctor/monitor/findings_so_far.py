"""What the checks find while a run goes on, before its report.

The looks are taken in a thread of the lowest priority that reads the folder by itself, so that the
monitor and the ranks go on meanwhile, and they take a small share of a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from ..report import registry
from ..report.diagnose import diagnose
from ..report.findings import Check, Confidence, Finding
from ..report.postmortem import fault_key
from ..report.suppression import NOTHING, Unwanted, without
from ..run import Recording
from ..storage.run_folder import RunFolder

FIRST_LOOK_S, AGAIN_S = 10.0, 2.0
"""Until the first look, and from one that found something new to the one that confirms it."""
EVERY_S = 10.0
SHARE = 0.02
"""Of a core."""
LEAST_PRIORITY = 19
MOMENT_S = 0.1


class SeenTwice:
    """Findings that two looks in a row have made: what one look says may be half a step, written by
    some ranks and not yet by others."""

    def __init__(self, key: Callable[[Finding], tuple[object, ...]] = fault_key) -> None:
        self._key = key
        self._before: dict[tuple[object, ...], Finding] = {}

    def look(self, found: Sequence[Finding]) -> list[Finding]:
        """Those proven ones that were there the last time, too."""
        proven = {self._key(f): f for f in found if f.confidence is Confidence.PROVEN}
        stable = [f for key, f in proven.items() if key in self._before]
        self._before = proven
        return stable

    def waits_for(self, stable: Sequence[Finding]) -> bool:
        """Whether the last look had findings that are not among these."""
        return len(self._before) > len(stable)


def same_place(finding: Finding) -> tuple[object, ...]:
    """What stays while a fault goes on: further steps, ranks and parameters may join it."""
    place = finding.location
    where = (place.file, place.line) if place else finding.subjects
    return finding.code, finding.rule, where


class FindingsSoFar:
    """Looks for findings from `start` to `close`.

    Attributes:
        found: those of now, in the order in which they were first made.
    """

    def __init__(
        self,
        folder: RunFolder,
        checks: Sequence[Check],
        unwanted: Unwanted = NOTHING,
        *,
        first_s: float = FIRST_LOOK_S,
    ) -> None:
        self.found: tuple[Finding, ...] = ()
        self._folder = folder
        self._recording = Recording(folder)
        self._checks = checks
        self._unwanted = unwanted
        self._untold: list[tuple[Finding, bool]] = []
        self._missed: set[tuple[object, ...]] = set()
        self._attempt = 0
        self._first_s = first_s
        self._seen = SeenTwice(same_place)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="findings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look no more. A look that is under way is not waited for."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(MOMENT_S)

    def take(self) -> list[tuple[Finding, bool]]:
        """What is new since the last call: findings that are made now (True), and some that are no
        longer made (False)."""
        taken, self._untold = self._untold, []
        return taken

    def _watch(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        pause = self._first_s
        while not self._over.wait(pause):
            began = time.thread_time()
            again = False
            with contextlib.suppress(Exception):  # the report at the end says what goes wrong
                again = self.look()
            spent = time.thread_time() - began
            pause = max(AGAIN_S if again else EVERY_S, spent / SHARE)

    def look(self) -> bool:
        """Look once; whether there is something that the next look may confirm or take back."""
        attempt = self._folder.attempts()[-1]
        if attempt != self._attempt:  # what the report says of earlier ones, it says at the end
            self._attempt, self._seen, self.found = attempt, SeenTwice(same_place), ()
        run = self._recording.refresh(attempt)
        run.now = time.monotonic()
        others = registry.others(self._checks)
        report = diagnose(run, self._checks, folder=str(self._folder.path), others=others)
        made = without(report, self._unwanted, run, self._checks).findings
        stable = self._seen.look(made)
        now = {same_place(f) for f in made}
        gone = [f for f in self.found if same_place(f) not in now]
        over = [f for f in gone if same_place(f) in self._missed]
        known = {same_place(f) for f in self.found}
        fresh = [f for f in stable if same_place(f) not in known]
        self._missed = {same_place(f) for f in gone}
        self.found = (*(f for f in self.found if f not in over), *fresh)
        self._untold = [*self._untold, *((f, True) for f in fresh), *((f, False) for f in over)]
        return self._seen.waits_for(stable) or bool(gone)
