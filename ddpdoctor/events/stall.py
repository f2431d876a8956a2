"""What the monitor saw of a run that stands still."""

from __future__ import annotations

from .base import Event, Part


class StallSeen(Event, frozen=True, tag="stall"):
    """Ranks make no progress.

    Attributes:
        since: when the last of them still did, on the clock of `at`.
        hang_after: seconds without progress that count as a stall, as given or as learned.
        proven: it cannot resolve by itself.
    """

    since: float
    hang_after: float
    proven: bool = False
    attempt: int = 0


class StallOver(Event, frozen=True, tag="stall-over"):
    """The ranks went on by themselves: what was suspected is withdrawn."""

    lasted_s: float
    attempt: int = 0


class StackFrame(Part, frozen=True):
    """A line of a stack (part of `RankStood`)."""

    file: str
    line: int
    function: str
    user: bool = False
    text: str = ""


class Worker(Part, frozen=True):
    """A child process of a rank (part of `RankStood`)."""

    pid: int
    state: str
    cpu_s: float
    waits_in: str = ""


class RankStood(Event, frozen=True, tag="rank-stood"):
    """Where a rank was when the run stood still, or when native code crashed in it.

    Attributes:
        crashed: the stack is the one at the crash, of the thread that met it.
        state: letter of `/proc/<pid>/stat`.
        cpu: share of one core that its main thread used or waited for in the last second or so.
        frames: the main thread's stack, innermost first; empty where it could not be taken.
        threads: of other Python threads, the innermost function of the user's, or else of all.
        phase, phase_site, still_s: what it did when it was looked at, as its ring said, and for how
            long without progress; -1 where unknown.
    """

    rank: int
    pid: int
    state: str = ""
    cpu: float = 0.0
    frames: tuple[StackFrame, ...] = ()
    threads: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()
    attempt: int = 0
    crashed: bool = False
    phase: int = -1
    phase_site: int = -1
    still_s: float = -1.0

    @property
    def measured(self) -> bool:
        """Whether its process was looked at; otherwise there is only the stack that it left."""
        return bool(self.state)

    @property
    def user_frame(self) -> StackFrame | None:
        """The innermost line of the user's."""
        return next((f for f in self.frames if f.user), None)

    @property
    def joins_threads(self) -> bool:
        """The program is over, and Python waits for threads that are no daemons."""
        return any(f.function == "_shutdown" and "threading" in f.file for f in self.frames)
