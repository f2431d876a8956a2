"""The ring of calls, and how long the rank has spent in each of the phases that it marks there."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from threading import get_ident

from ...events import Account
from ...events.timing import EVALUATING, LONG_S, SAVING
from ...storage.call_ring import PHASE_AT, WHERE, Phase, RingWriter
from ..recording.recorder import Recorder

_USER = int(Phase.USER)
_DATA = int(Phase.DATA)
_FORWARD = int(Phase.FORWARD)
_BACKWARD = int(Phase.BACKWARD)


class TimedRing(RingWriter):
    """Every second since the process began belongs to one account: a phase, and its line.

    A switch costs one addition; the time that collectives wait, and the doctor's own, are taken out
    of the account that was open then. Only one thread's phases are timed.

    Attributes:
        since: when the account was opened that is open.
        thread: of the phases that are timed, the one that took the last optimizer step.
        own_s, waited_s: seconds by account: the line's number times 16, plus the phase.
        elsewhere: seconds since then that the rank has waited, or saved.
        in_evaluation: `EVALUATING` while the rank evaluates, else 0.
        long: by account, the stretches of `LONG_S` and more, see `Account`.
    """

    def __init__(self, path: Path, recorder: Recorder) -> None:
        self.recorder = recorder
        self.thread = get_ident()
        self.own_s: defaultdict[int, float] = defaultdict(float)
        self.waited_s: defaultdict[int, float] = defaultdict(float)
        self.long: dict[int, list[float]] = {}
        self._open = self._before = -16 | Phase.START
        self.since = recorder.began
        self._own_ns = 0
        self.elsewhere = 0.0
        self.in_evaluation = 0
        super().__init__(path)

    def phase(self, phase: int, site: int) -> float:
        """The rank goes over to another phase; returns the time."""
        now = super().phase(phase, site)
        self._switch(phase, site, now)
        return now

    def enter(self, phase: int, site: int, now: float) -> None:
        """The rank enters another phase, at a time that the caller knows."""
        # As `RingWriter.enter` and `_switch`, without another call: six times in every step.
        WHERE.pack_into(self._map, PHASE_AT, phase, site, now, self.step, self.count, now)
        if get_ident() != self.thread:
            return
        own_ns = self.recorder.own_ns
        spent = now - self.since - (own_ns - self._own_ns) * 1e-9
        if self.elsewhere:
            spent -= self.elsewhere
            self.elsewhere = 0.0
        account = self._open
        self.own_s[account] += spent
        if spent >= LONG_S and account & 7 != _BACKWARD:
            self.add_long(account, spent, self.step)
        if phase >= _FORWARD:
            self.in_evaluation = 0
        self._before = account
        self._open = site << 4 | phase | self.in_evaluation
        self.since, self._own_ns = now, own_ns

    def _switch(self, phase: int, site: int, now: float) -> None:
        if get_ident() != self.thread:
            return
        own_ns = self.recorder.own_ns
        spent = now - self.since - (own_ns - self._own_ns) * 1e-9
        if self.elsewhere:
            spent -= self.elsewhere
            self.elsewhere = 0.0
        account = self._open
        self.own_s[account] += spent
        # What a backward has waited is only known after it.
        if spent >= LONG_S and account & 7 != _BACKWARD:
            self.add_long(account, spent, self.step)
        if phase >= _FORWARD:
            self.in_evaluation = 0
        self._before = account
        self._open = site << 4 | phase | self.in_evaluation
        self.since, self._own_ns = now, own_ns

    def passed(
        self, stretches: list[tuple[int, int, float, float]], phase: int, site: int, now: float
    ) -> None:
        """Add up what was only marked in the file (`mark_phase`): light steps.

        Args:
            stretches: phase, site, seconds, and how many of them were spent waiting.
            phase, site: what ended last, at the time `now`; since then the program's own code runs.
        """
        own_ns = self.recorder.own_ns
        own = (own_ns - self._own_ns) * 1e-9
        self.own_s[self._open] -= self.elsewhere
        between = sum(s for p, _, s, _ in stretches if p == _USER)
        # The doctor's functions were entered and left in the program's own time.
        left = max(0.0, 1 - own / between) if between else 1.0
        for kind, line, seconds, waited in stretches:
            account = line << 4 | kind
            self.own_s[account] += seconds * left if kind == _USER else seconds - waited
            if waited:
                self.waited_s[account] += waited
        self._before, self._open = site << 4 | phase, site << 4 | _USER
        self.since, self._own_ns, self.elsewhere = now, own_ns, 0.0

    def evaluating(self, on: bool) -> None:
        """Whether the rank evaluates, until it trains: in the loading or the forward that has just
        begun, and what follows."""
        if get_ident() == self.thread:
            self.in_evaluation = EVALUATING if on else 0
            if self._open & 7 in (_DATA, _FORWARD):
                self._open = self._open & ~EVALUATING | self.in_evaluation

    def waited(self, seconds: float) -> None:
        """A collective has returned after so many seconds."""
        if get_ident() == self.thread:
            self.waited_s[self._open] += seconds
            self.elsewhere += seconds

    def waited_before(self, seconds: float) -> None:
        """In the phase that is over, so many seconds were spent waiting."""
        if get_ident() == self.thread:
            self.own_s[self._before] -= seconds
            self.waited_s[self._before] += seconds

    def saved(self, seconds: float, site: int) -> None:
        """`torch.save` has returned after so many seconds."""
        if get_ident() == self.thread:
            account = site << 4 | SAVING
            self.own_s[account] += seconds
            self.elsewhere += seconds
            if seconds >= LONG_S:
                self.add_long(account, seconds, self.step)

    def step_ended(self, step: int) -> None:
        """So many optimizer steps were taken."""
        self.step = step
        self.thread = get_ident()

    @property
    def doctor_s(self) -> float:
        """The doctor's own time up to the last switch."""
        return self._own_ns / 1e9

    def accounts(self) -> tuple[float, tuple[Account, ...]]:
        """The time, and all accounts up to it."""
        now = time.monotonic()
        as_it_is = self._open, self._before, self.in_evaluation
        self._switch(Phase.USER, -1, now)
        self._open, self._before, self.in_evaluation = as_it_is
        return now, tuple(
            Account(
                account & 15,
                account >> 4,
                round(self.own_s[account], 6),
                round(self.waited_s.get(account, 0.0), 6),
                *self._long(account),
            )
            for account in list(self.own_s)
        )

    def add_long(self, account: int, seconds: float, step: int) -> None:
        """An account was open for `LONG_S` or more in that step."""
        known = self.long.setdefault(account, [0, 0.0, step, -1, 0.0])
        known[0] += known[3] != step
        known[1] += seconds
        known[3] = step
        known[4] = max(known[4], seconds)

    def _long(self, account: int) -> tuple[int, float, int, int, float]:
        count, seconds, first, last, longest = self.long.get(account, (0, 0.0, -1, -1, 0.0))
        return int(count), round(seconds, 6), int(first), int(last), round(longest, 6)
