"""The life of a rank's process: start, exceptions, exit, and the probe's own state."""

from __future__ import annotations

from .base import Event, Part
from .calls import Statement


class RankStarted(Event, frozen=True, tag="rank-started"):
    """First record of every rank.

    Attributes:
        wall: seconds since the epoch at `at`.
        rank, world_size: -1 where the process did not know them yet.
        attempt: torchrun's restart count.
        environment: the variables that matter to training; secrets are left out.
        script_digest: hash of the script's text, to tell ranks with different code apart.
        cores: CPU cores this process may run on.
        spawned: how many processes `torch.multiprocessing.spawn` made with this one, 0 where it
            was not made like that.
    """

    schema: int
    wall: float
    rank: int
    local_rank: int
    world_size: int
    pid: int
    node: str
    attempt: int = 0
    argv: tuple[str, ...] = ()
    cwd: str = ""
    python: str = ""
    script_digest: str = ""
    environment: dict[str, str] = {}
    cores: int = 0
    spawned: int = 0

    def describe(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size} started: pid {self.pid} on {self.node}, "
            f"Python {self.python}, {self.cores} cores"
        )


class TorchLoaded(Event, frozen=True, tag="torch-loaded"):
    """What this rank computes with, known once torch is imported.

    Attributes:
        late: it was imported unnoticed, and used before it was watched.
    """

    torch: str
    cuda: str = ""
    nccl: str = ""
    threads: int = 0
    interop_threads: int = 0
    gpus: int = 0
    late: bool = False

    def describe(self) -> str:
        return f"torch {self.torch}, CUDA {self.cuda or 'none'}, {self.threads} threads"


class Frame(Part, frozen=True):
    """A line of a traceback (part of `ExceptionRaised`).

    Attributes:
        inside: the statements around it in its function, innermost first, where it is the user's.
    """

    file: str
    line: int
    function: str
    user: bool = False
    inside: tuple[Statement, ...] = ()


class Relayed(Part, frozen=True):
    """Another exception behind one (part of `ExceptionRaised`): of another process or thread,
    known by its text, or of this one.

    Attributes:
        where: as torch names it: `DataLoader worker process 0`; empty for this process.
        frames: of its own traceback, outermost first.
    """

    where: str
    kind: str
    message: str
    frames: tuple[Frame, ...] = ()


class ExceptionRaised(Event, frozen=True, tag="exception"):
    """An exception left the user's program (or a spawned rank's function).

    Attributes:
        kind: qualified class name.
        message: its text, cut to a few kilobytes.
        frames: outermost first; after those of the traceback the line that could not be parsed, or
            the `breakpoint()` of a debugger that quit.
        caught: the program caught it: just before it left with a status of its own, or it went on.
        relayed: the exception that torch raised again here, as one of a DataLoader's worker.
        first: the exception that was being handled as it was raised; the first of several.
        still_s: so long before the rank was last seen to do anything; -1 for unknown.
    """

    kind: str
    message: str
    frames: tuple[Frame, ...] = ()
    caught: bool = False
    step: int = -1
    relayed: Relayed | None = None
    first: Relayed | None = None
    still_s: float = -1.0

    def describe(self) -> str:
        told = self.relayed or self
        first = told.message.strip().splitlines()[:1]
        return f"{'caught' if self.caught else 'raised'} {told.kind}: {first[0] if first else ''}"


class ThreadFailed(Event, frozen=True, tag="thread-failed"):
    """A thread of the program's own ended with an exception, while the program goes on.

    Attributes:
        thread: its name; kind, message, frames: as in `ExceptionRaised`.
    """

    thread: str
    kind: str
    message: str
    frames: tuple[Frame, ...] = ()
    step: int = -1

    def describe(self) -> str:
        first = self.message.strip().splitlines()[:1]
        return f"thread {self.thread} ended with {self.kind}: {first[0] if first else ''}"


class ExceptionPassed(Event, frozen=True, tag="exception-passed"):
    """An exception came out of something that is watched; the program may have caught it.

    Attributes:
        where: `forward`, `backward` or `data`; `handler`: the program caught and logged it;
            `unwinding`: it was being handled, or on its way through a `finally`, as a collective
            was called.
        message: the begin of its text; of a loader's worker, what was raised there.
        step: optimizer steps of this process before it.
        site: the last line of the user's on its way; -1 where there was none.
        tried: of the last two, the line of the `try` that the exception came out of.
    """

    where: str
    kind: str
    message: str
    step: int
    site: int = -1
    tried: int = -1

    @property
    def text(self) -> str:
        """`ValueError: bad sample`"""
        return ": ".join((self.kind, *(t[:100] for t in self.message.strip().splitlines()[:1])))

    def describe(self) -> str:
        return f"{self.text} in the {self.where} (step {self.step})"


class SignalSent(Event, frozen=True, tag="signal-sent"):
    """The program is about to send a signal.

    Attributes:
        pid: of the process that it is for; signal: its number.
    """

    pid: int
    signal: int
    site: int = -1

    def describe(self) -> str:
        return f"sends signal {self.signal} to process {self.pid}"


class RankExiting(Event, frozen=True, tag="rank-exiting"):
    """The interpreter is leaving.

    Attributes:
        how: `return`, `sys.exit` (whatever raised `SystemExit`; `site` is -1 where that was not
            seen), `os._exit` or `exception`.
        status: the exit status where the process knew it, else None.
        message: what `sys.exit` was given to print.
        torch_imported: torch was among the loaded modules at the end.
    """

    how: str
    status: int | None = None
    site: int = -1
    groups_alive: int = 0
    message: str = ""
    torch_imported: bool = False

    def describe(self) -> str:
        return f"leaving ({self.how}{'' if self.status is None else f', status {self.status}'})"


class ProbeTrouble(Event, frozen=True, tag="probe-trouble"):
    """Something inside the probe failed; training went on without it.

    Attributes:
        part: which hook.
        lost: what is therefore not observed.
    """

    part: str
    error: str
    lost: str = ""
    disabled: bool = False

    def describe(self) -> str:
        return f"doctor: {self.part} failed ({self.error}); not observed: {self.lost or self.part}"


class NotObserved(Event, frozen=True, tag="not-observed"):
    """The probe chose not to look at something, and why. `check` is a check's name or a family."""

    check: str
    reason: str


CLOSE_STEPS = 128
"""The doctor looks closely at so many first steps, whatever it costs."""


class ProbeCost(Event, frozen=True, tag="probe-cost"):
    """The doctor's own time in this rank so far, in seconds.

    Attributes:
        wall_s: since the process was started, or since a later examination in it began.
        start_s: what of it went into the start: the doctor's imports, and the wrapping of torch.
        steps: optimizer steps until then, of any optimizer; -1 where that was not recorded.
    """

    own_s: float
    wall_s: float
    events: int = 0
    dropped: int = 0
    steps: int = -1
    start_s: float = 0.0
