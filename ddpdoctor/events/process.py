"""The life of a rank's process: start, exceptions, exit, and the probe's own state."""

from __future__ import annotations

import enum

from .base import Event, Part
from .calls import Statement


class RankStarted(Event, frozen=True, tag="rank-started"):
    """First record of every rank.

    Attributes:
        wall: seconds since the epoch at `at`.
        rank, world_size: -1 if the process did not know them yet.
        attempt: torchrun's restart count.
        environment: the variables that matter to training; secrets are left out.
        script_digest: hash of the script's text, which differs between ranks with different code.
        cores: CPU cores this process may run on.
        spawned: number of processes that `torch.multiprocessing.spawn` started together with this
            one, 0 if it was not spawned.
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
        late: torch was imported and used before the probe could wrap it.
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
        inside: for a line of the user, the statements around it in its function, innermost first.
    """

    file: str
    line: int
    function: str
    user: bool = False
    inside: tuple[Statement, ...] = ()


class Relayed(Part, frozen=True):
    """An exception that led to another one (part of `ExceptionRaised`): of another process or
    thread, known by its text, or of this one.

    Attributes:
        where: torch's name for the process (`DataLoader worker process 0`); empty for this one.
        frames: of its own traceback, outermost first.
    """

    where: str
    kind: str
    message: str
    frames: tuple[Frame, ...] = ()


class Unset(Part, frozen=True):
    """A variable or attribute that an exception says is missing, and that the program sets under a
    condition only (part of `ExceptionRaised`).

    Attributes:
        site: the line that sets it.
        under: the condition around that line.
    """

    name: str
    site: int
    under: Statement


class ExceptionRaised(Event, frozen=True, tag="exception"):
    """An exception left the user's program (or a spawned rank's function).

    Attributes:
        kind: qualified class name.
        message: its text, cut to a few kilobytes.
        frames: outermost first. After those of the traceback, the line of a syntax error or the
            `breakpoint()` of a debugger that quit.
        caught: the program caught it, and went on or exited with a status of its own.
        relayed: the exception of a DataLoader worker that torch raised again here.
        first: the exception that was being handled when this one was raised; the first of a chain.
        still_s: seconds since the rank's last progress; -1 if unknown.
        unset: what it says is missing, if that is known to be set under a condition.
        optimizers: the lines that made the optimizers which the failing call of the user's was
            given.
    """

    kind: str
    message: str
    frames: tuple[Frame, ...] = ()
    caught: bool = False
    step: int = -1
    relayed: Relayed | None = None
    first: Relayed | None = None
    still_s: float = -1.0
    unset: Unset | None = None
    optimizers: tuple[int, ...] = ()

    def describe(self) -> str:
        told = self.relayed or self
        first = told.message.strip().splitlines()[:1]
        return f"{'caught' if self.caught else 'raised'} {told.kind}: {first[0] if first else ''}"


class ThreadFailed(Event, frozen=True, tag="thread-failed"):
    """A thread of the program ended with an exception, while the program goes on.

    Attributes:
        thread: name of the thread; `kind`, `message` and `frames` as in `ExceptionRaised`.
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
    """An exception left a forward, a backward or a loader, or was being handled; the program may
    have caught it.

    Attributes:
        where: `forward`, `backward` or `data`; `handler`: the program caught and logged it;
            `unwinding`: a collective was called in its handler or in a `finally`.
        message: the begin of its text; for a DataLoader worker, of the exception raised there.
        step: optimizer steps of this process before it.
        site: the innermost line of the user in its traceback; -1 if there is none.
        tried: for `handler` and `unwinding`, the line in the `try` that raised.
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
    """The program is about to send a signal, or to have one sent to itself.

    Attributes:
        pid: the process that gets it.
        signal: its number.
        timer: it comes when a timer of the program's is over (`signal.alarm`).
    """

    pid: int
    signal: int
    site: int = -1
    timer: bool = False

    def describe(self) -> str:
        if self.timer:
            return f"starts a timer that ends with signal {self.signal}"
        return f"sends signal {self.signal} to process {self.pid}"


class RankExiting(Event, frozen=True, tag="rank-exiting"):
    """The interpreter is leaving.

    Attributes:
        how: `return`, `sys.exit` (anything that raised `SystemExit`; `site` is -1 if that was not
            observed), `os._exit` or `exception`.
        status: the exit status if the process knew it, else None.
        message: the message passed to `sys.exit`.
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


class Watched(enum.Enum):
    """What watchers of the probe observe, where a report depends on it. The values are what they
    record as lost (`ProbeTrouble.lost`)."""

    OPTIONS = "hyper-parameters and loss scales"
    EDITS = "edits of gradients and parameters by hand"
    LOADS = "loads of weights and optimizer states"
    LOADERS = "what each rank read from its DataLoaders"


LOADERS_LOST = Watched.LOADERS.value


class ProbeTrouble(Event, frozen=True, tag="probe-trouble"):
    """Something inside the probe failed; training went on without it.

    Attributes:
        part: the hook that failed.
        lost: what is not observed because of that.
    """

    part: str
    error: str
    lost: str = ""
    disabled: bool = False

    @property
    def watched(self) -> Watched | None:
        """What `lost` says, where a report depends on it."""
        return next((watched for watched in Watched if watched.value == self.lost), None)

    def describe(self) -> str:
        return f"doctor: {self.part} failed ({self.error}); not observed: {self.lost or self.part}"


class NotObserved(Event, frozen=True, tag="not-observed"):
    """The probe could not look at something, and why.

    Attributes:
        check: name of the check; partly: only some of its facts are missing, those in `reason`.
    """

    check: str
    reason: str
    partly: bool = False


CLOSE_STEPS = 128
"""First steps that the doctor looks at closely, whatever the budget."""


class ProbeCost(Event, frozen=True, tag="probe-cost"):
    """The doctor's own time in this rank so far, in seconds.

    Attributes:
        wall_s: since the start of the process, or of a later examination in it.
        start_s: the part of it for the start: the doctor's imports and the wrapping of torch.
        steps: steps of all optimizers so far; -1 if not recorded.
        device_s: what devices worked for the doctor, estimated.
    """

    own_s: float
    wall_s: float
    events: int = 0
    dropped: int = 0
    steps: int = -1
    start_s: float = 0.0
    device_s: float = 0.0
