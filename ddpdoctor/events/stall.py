"""What the monitor observes of a stalled run."""

from __future__ import annotations

from itertools import takewhile

from .base import Event, Part


class StallSeen(Event, frozen=True, tag="stall"):
    """Ranks make no progress.

    Attributes:
        since: time of the last progress of any of them, on the clock of `at`.
        hang_after: seconds without progress that count as a stall, as configured or learned.
        proven: it is a deadlock: it cannot resolve by itself.
    """

    since: float
    hang_after: float
    proven: bool = False
    attempt: int = 0


class StallOver(Event, frozen=True, tag="stall-over"):
    """The ranks made progress again; the suspected stall is withdrawn."""

    lasted_s: float
    attempt: int = 0


DEEPEST = 60
"""Frames of a stack that are recorded, from the innermost on."""


class StackFrame(Part, frozen=True):
    """A line of a stack (part of `RankStood`)."""

    file: str
    line: int
    function: str
    user: bool = False
    text: str = ""


class Worker(Part, frozen=True):
    """A child process of a rank (part of `RankStood`).

    Attributes:
        frames: its main thread's stack, innermost first, from the begin of the worker on; empty if
            it was not asked for (it is no worker of a loader that the rank waits for) or gave none.
    """

    pid: int
    state: str
    cpu_s: float
    waits_in: str = ""
    frames: tuple[StackFrame, ...] = ()


class RankStood(Event, frozen=True, tag="rank-stood"):
    """The stack of a rank when the run stalled, or when native code crashed in it.

    Attributes:
        crashed: the stack is that of the thread that crashed.
        native: a thread that runs no Python met the fatal error (a backend's, the watchdog of
            NCCL); the stack is then that of the main thread.
        state: letter of `/proc/<pid>/stat`.
        cpu: share of one core that its main thread used or waited for in about the last second.
        frames: the main thread's stack, innermost first; empty if it could not be taken.
        threads: for each other Python thread its innermost user function, else its innermost one;
            `thread_frames` those of the user's.
        phase, phase_site, still_s: phase of the step and its line by the ring, and seconds without
            progress; -1 if unknown.
    """

    rank: int
    pid: int
    state: str = ""
    cpu: float = 0.0
    frames: tuple[StackFrame, ...] = ()
    threads: tuple[str, ...] = ()
    thread_frames: tuple[StackFrame, ...] = ()
    workers: tuple[Worker, ...] = ()
    attempt: int = 0
    crashed: bool = False
    native: bool = False
    phase: int = -1
    phase_site: int = -1
    still_s: float = -1.0

    @property
    def measured(self) -> bool:
        """Whether the process was examined; otherwise there is only the stack that it wrote."""
        return bool(self.state)

    @property
    def user_frame(self) -> StackFrame | None:
        """The innermost frame of the user, None if there is none."""
        return next((f for f in self.frames if f.user), None)

    @property
    def importing(self) -> bool:
        """Whether the user's innermost line, or torch below it, is importing a module."""
        inside = takewhile(lambda f: not f.user, self.frames)
        return any(f.file.startswith("<frozen importlib") for f in inside)

    @property
    def outermost_of_user(self) -> StackFrame | None:
        """The function of the user's that Python itself has called, after the end of the program:
        the outermost frame, where that is no module. None where there is none."""
        last = self.frames[-1] if 0 < len(self.frames) < DEEPEST else None
        return last if last is not None and last.user and last.function != "<module>" else None

    @property
    def joins_threads(self) -> bool:
        """Whether the program has ended and Python waits for non-daemon threads."""
        return any(f.function == "_shutdown" and "threading" in f.file for f in self.frames)
