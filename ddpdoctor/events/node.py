"""What was seen of the ranks from outside: by the launcher's agent and by the node's monitor."""

from __future__ import annotations

from .base import Event
from .stall import StackFrame


class MonitorStarted(Event, frozen=True, tag="monitor-started"):
    """First record of a node's file.

    Attributes:
        cpu_quota: cores' worth of time that the control group may use, None where unlimited.
        gpus, gpu_uuids: names and identities by NVML's index.
        gpu_trouble: why nothing can be said of GPUs, where they seem to be there.
    """

    schema: int
    wall: float
    node: str
    node_rank: int
    pid: int
    cores: int = 0
    memory_bytes: int = 0
    gpus: tuple[str, ...] = ()
    cpu_quota: float | None = None
    gpu_uuids: tuple[str, ...] = ()
    gpu_memory_bytes: tuple[int, ...] = ()
    driver: str = ""
    gpu_trouble: str = ""


class ProcessStarted(Event, frozen=True, tag="process-started"):
    """The launcher started a process for a rank, whether or not the rank itself ever reports.

    Attributes:
        pid: of what the launcher started; the rank itself may be a child of it (`--no-python`).
        wall: seconds since the epoch.
    """

    rank: int
    local_rank: int
    pid: int
    wall: float
    world_size: int = 0
    attempt: int = 0


class ProcessEnded(Event, frozen=True, tag="process-ended"):
    """A rank's process is gone.

    Attributes:
        status: exit status, None where a signal ended it or nobody could tell.
        signal: the signal that ended it.
        by_launcher: it was the launcher that ended it, cleaning up after another's failure.
        silent: nobody could tell how, and it left no stacks, as it would where it was told to end.
        wall: seconds since the epoch.
    """

    rank: int
    pid: int
    wall: float
    status: int | None = None
    signal: int | None = None
    by_launcher: bool = False
    attempt: int = 0
    silent: bool = False


class SpawnFailed(Event, frozen=True, tag="spawn-failed"):
    """A process that `torch.multiprocessing.spawn` made, and that never became a rank, raised: it
    then ends all others of that call.

    Attributes:
        index: its number in that call, of `count` processes; `count` is 0 where that is not known.
        wall: seconds since the epoch.
        kind, message: as in `ExceptionRaised`; frames: the user's lines, outermost first.
    """

    wall: float
    index: int
    count: int
    pid: int
    kind: str
    message: str
    frames: tuple[StackFrame, ...] = ()


class SpawnEnded(Event, frozen=True, tag="spawn-ended"):
    """Of the processes that `torch.multiprocessing.spawn` made the first to end with an error, but
    without an exception: by an exit status of its own, or a signal.

    Attributes:
        wall: seconds since the epoch, when all of them were gone.
        told: those that SIGTERM ended beside it, as spawn sends it to whoever is left.
    """

    wall: float
    pid: int
    status: int | None = None
    signal: int | None = None
    told: tuple[int, ...] = ()


class ExaminedInside(Event, frozen=True, tag="examined-inside"):
    """Another ddpdoctor, which this command had started, examined its ranks in its own folder."""

    folder: str


class ProcessState(Event, frozen=True, tag="process-state"):
    """A rank's process was found stopped, a zombie, or back from that.

    Attributes:
        state: letter of `/proc/<pid>/stat`: `T` stopped, `t` traced, `Z` zombie, else running.
    """

    rank: int
    pid: int
    state: str
    attempt: int = 0


class RankSample(Event, frozen=True, tag="rank-sample"):
    """What a rank's process used. Taken every second at first, more rarely as a run gets long.

    Attributes:
        rss_bytes: resident memory of the rank's own process.
        children: its descendants (DataLoader workers), `children_bytes` what they hold alone,
            pages that they share with files or shared memory left out.
        gpu_bytes: memory on each GPU, by NVML's index; only GPUs where there is any.
        runnable: how many threads of the rank and its descendants ran or waited for a core, on
            average since the sample before; None where the kernel does not say.
    """

    rank: int
    pid: int
    rss_bytes: int
    children: int = 0
    children_bytes: int = 0
    gpu_bytes: dict[int, int] = {}
    attempt: int = 0
    runnable: float | None = None


class NodeSample(Event, frozen=True, tag="node-sample"):
    """What the node had left, taken with the samples of its ranks.

    Attributes:
        gpu_used_bytes: by NVML's index, whoever uses it; `gpu_busy_percent` likewise.
        orphans: processes that a rank, say, started and that have outlived it; -1 where such are
            not known.
    """

    available_bytes: int
    gpu_used_bytes: tuple[int, ...] = ()
    gpu_busy_percent: tuple[int, ...] = ()
    orphans: int = -1


class MemoryLimit(Event, frozen=True, tag="memory-limit"):
    """The control group's memory: at the start, at the end, and when the kernel killed in it.

    Attributes:
        limit_bytes: None where there is no limit.
        oom_kills: processes that the kernel ended for lack of memory, in this control group
            since it exists; None where the kernel does not say.
    """

    limit_bytes: int | None = None
    used_bytes: int | None = None
    oom_kills: int | None = None


class Stopped(Event, frozen=True, tag="stopped"):
    """Somebody stopped the whole run: `doctor`, `interrupt` (Ctrl-C), `terminate` (SIGTERM)."""

    by: str
    reason: str = ""
