"""What the launcher's agent and the node's monitor observe of the ranks from outside."""

from __future__ import annotations

from .base import Event, Part
from .stall import StackFrame


class MonitorStarted(Event, frozen=True, tag="monitor-started"):
    """First record of a node's file.

    Attributes:
        cpu_quota: CPU limit of the control group in cores, None if unlimited.
        gpus, gpu_uuids: names and UUIDs by NVML's index.
        gpu_trouble: why GPUs that seem to exist could not be queried.
        divided: UUIDs of the GPUs that are divided into instances (MIG).
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
    divided: tuple[str, ...] = ()


class NodeSilent(Event, frozen=True, tag="node-silent"):
    """The first node has not heard of another one any more, which had not said that it was done.

    Attributes:
        node: its number; host: its name; ranks: those whose records it had sent.
        wall: when it was heard of last, seconds since the epoch.
        over: it is heard of again.
    """

    node: int
    host: str
    ranks: tuple[int, ...]
    wall: float
    over: bool = False


class ProcessStarted(Event, frozen=True, tag="process-started"):
    """The launcher started a process for a rank, whether or not the rank itself ever reports.

    Attributes:
        pid: of the process that was started; the rank itself may be its child (`--no-python`).
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
        status: exit status, None if a signal ended it or it is unknown.
        signal: the signal that ended it.
        by_launcher: the launcher ended it after another rank failed.
        silent: it is unknown how it ended, and it left no stacks, as it would after SIGTERM.
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
    """A process started by `torch.multiprocessing.spawn` raised before it became a rank; spawn then
    ends all other processes of that call.

    Attributes:
        index: its number in that call, of `count` processes (0 if unknown).
        wall: seconds since the epoch.
        kind, message: as in `ExceptionRaised`; `frames` are the user's lines, outermost first.
    """

    wall: float
    index: int
    count: int
    pid: int
    kind: str
    message: str
    frames: tuple[StackFrame, ...] = ()


class SpawnEnded(Event, frozen=True, tag="spawn-ended"):
    """The first process of a `torch.multiprocessing.spawn` that ended with an error but without an
    exception: by an exit status or a signal.

    Attributes:
        wall: seconds since the epoch, when all processes were gone.
        told: the others that ended by SIGTERM, which spawn sends to the remaining processes.
    """

    wall: float
    pid: int
    status: int | None = None
    signal: int | None = None
    told: tuple[int, ...] = ()


class ExaminedInside(Event, frozen=True, tag="examined-inside"):
    """The command started another ddpdoctor, which recorded its ranks in its own folder."""

    folder: str


STOPPED_STATES = ("T", "t")
"""Letters of `/proc/<pid>/stat` for a process that a signal, or a debugger, has stopped."""


class ProcessState(Event, frozen=True, tag="process-state"):
    """A rank's process was found stopped or a zombie, or running again after that.

    Attributes:
        state: letter of `/proc/<pid>/stat`: `T` stopped, `t` traced, `Z` zombie, else running.
    """

    rank: int
    pid: int
    state: str
    attempt: int = 0


class ChildMemory(Part, frozen=True):
    """Memory of a child of a rank (part of `RankSample`), such as a worker of a DataLoader.

    Attributes:
        rss_bytes: its resident memory, what it shares with its parent included.
        private_bytes: of these, what it shares with no other process.
    """

    pid: int
    rss_bytes: int
    private_bytes: int


class RankSample(Event, frozen=True, tag="rank-sample"):
    """Resources that a rank's process uses. Sampled every second at first, more rarely later.

    Attributes:
        rss_bytes: resident memory of the rank's own process.
        children: number of its descendants (DataLoader workers); `children_bytes` is their private
            memory, without file pages and shared memory.
        forked: memory of its children, in some of the samples: it takes time to read.
        gpu_bytes: memory on each GPU that it uses, by NVML's index.
        runnable: average number of threads of the rank and its descendants that ran or waited for a
            core since the last sample; None if the kernel does not tell.
    """

    rank: int
    pid: int
    rss_bytes: int
    children: int = 0
    children_bytes: int = 0
    gpu_bytes: dict[int, int] = {}
    attempt: int = 0
    runnable: float | None = None
    forked: tuple[ChildMemory, ...] = ()


class NodeSample(Event, frozen=True, tag="node-sample"):
    """Free resources of the node, sampled together with its ranks.

    Attributes:
        gpu_used_bytes, gpu_busy_percent: by NVML's index, of all processes together.
        orphans: number of processes that outlived the process that started them; -1 if unknown.
    """

    available_bytes: int
    gpu_used_bytes: tuple[int, ...] = ()
    gpu_busy_percent: tuple[int, ...] = ()
    orphans: int = -1


class MemoryLimit(Event, frozen=True, tag="memory-limit"):
    """The control group's memory: at the start, at the end, and when the kernel killed in it.

    Attributes:
        limit_bytes: None if there is no limit.
        oom_kills: processes of this control group that the kernel has killed for lack of memory;
            None if the kernel does not tell.
    """

    limit_bytes: int | None = None
    used_bytes: int | None = None
    oom_kills: int | None = None


class Stopped(Event, frozen=True, tag="stopped"):
    """Somebody stopped the whole run: `doctor`, `interrupt` (Ctrl-C), `terminate` (SIGTERM), or
    only torchrun on this node: `launcher`."""

    by: str
    reason: str = ""
