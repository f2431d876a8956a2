"""Facts about processes, memory and GPUs, from /proc, control groups and NVML. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_THREADS = 128
_PR_GET_CHILD_SUBREAPER = 37
_TICKS = os.sysconf("SC_CLK_TCK")
_NO_LIMIT = 1 << 60  # how control groups of version 1 spell "none"


@dataclass(frozen=True)
class Stat:
    """A process in `/proc/<pid>/stat`; `born` in clock ticks, a zombie's `exit_code` as Popen's."""

    state: str
    parent: int
    born: int
    exit_code: int | None


@dataclass(frozen=True)
class Memory:
    """Memory of a process and of its descendants in bytes, and the `pids` of all of them."""

    own: int
    children: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class GroupMemory:
    """Memory of our control group in bytes; None where it is not known or has no limit."""

    limit: int | None = None
    used: int | None = None
    oom_kills: int | None = None


def _told(*names: object) -> str:
    """The text of a file of /proc. Without `Path`, for speed: each is read several times a second.

    Raises:
        OSError: there is no such process, or thread.
    """
    with open("/".join(map(str, (_PROC, *names))), errors="replace") as file:
        return file.read()


def cores() -> int:
    """The number of cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _own_groups() -> list[tuple[str, str]]:
    """Controllers and path of each of our control groups; in version 2 there is one, without."""
    try:
        lines = _told("self", "cgroup").splitlines()
    except OSError:
        return []
    return [(controllers, path) for _, controllers, path in (n.split(":", 2) for n in lines)]


def cpu_quota() -> float | None:
    """The CPU quota of our control group in cores; None where unlimited."""
    return min((q for group in _own_groups() for q in _quotas(*group)), default=None)


def _quotas(controllers: str, path: str) -> Iterator[float]:
    """The CPU quotas of a control group and of its parents, in cores."""
    names: tuple[str, ...] = ("cpu.max",)
    if not controllers:
        root = _GROUPS
    elif "cpu" in controllers.split(","):
        root, names = _GROUPS / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    else:
        return
    folder = root / path.lstrip("/")
    for place in {folder, *folder.parents, root}:
        if not place.is_relative_to(root):
            continue
        try:
            words = " ".join((place / name).read_text() for name in names).split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # "max"
            continue
        if quota > 0 and period > 0:
            yield quota / period


def runnable_ns(pids: Iterable[int]) -> dict[int, int]:
    """For each thread, the nanoseconds that it has run or waited for a core so far."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            threads = os.listdir(_PROC / str(pid) / "task")[:_MOST_THREADS]
        except OSError:
            continue
        for thread in threads:
            try:
                text = _told(pid, "task", thread, "schedstat")
            except OSError:
                continue
            fields = text.split()
            if len(fields) >= 2:
                found[int(thread)] = int(fields[0]) + int(fields[1])
    return found


def memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def stat(pid: int) -> Stat | None:
    """The state of a process; None where there is no such process."""
    fields = _stat_fields(pid)
    if len(fields) < 20:
        return None
    ended = fields[0] == "Z" and len(fields) > 49
    code = os.waitstatus_to_exitcode(int(fields[49])) if ended else None
    return Stat(fields[0], int(fields[1]), int(fields[19]), code)


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    seen = stat(pid)
    return seen is not None and seen.state != "Z"


def _stat_fields(pid: int) -> list[str]:
    """`/proc/<pid>/stat` from the state on; empty where there is no such process."""
    try:
        return _told(pid, "stat").rpartition(")")[2].split()  # the name may hold anything
    except OSError:
        return []


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has opened a file, judged by the file's name: on a file system that hangs,
    looking at the file itself would hang too."""
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            if os.path.basename(_target(link)) == path.name:
                return True
    except OSError:
        pass
    return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process; 0 where there is no such process."""
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if len(fields) > 12 else 0.0


def wakings(pid: int, thread: int = 0) -> int:
    """How often a thread of a process, the main one unless given, has slept and gone on; 0 where it
    is gone."""
    path = Path(f"/proc/{pid}/task/{thread or pid}/status")
    return _counter(path, "voluntary_ctxt_switches:") or 0


def wanted_seconds(pid: int, thread: int = 0) -> float:
    """Seconds that a thread, the main one unless given, has run or waited for a core. Unlike CPU
    time, these do not depend on how busy the machine is."""
    try:
        fields = _told(pid, "task", thread or pid, "schedstat").split()
        return (int(fields[0]) + int(fields[1])) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0 if thread else cpu_seconds(pid)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so that the signal does not end it."""
    try:
        for line in _told(pid, "status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, IndexError, ValueError):
        pass
    return False


def children(pid: int) -> list[int]:
    """The pids of the direct children of a process."""
    found: list[int] = []
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return found
    for task in tasks:
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue
    return sorted(found)


def orphans() -> int:
    """How many processes have become children of this one because their parent ended, besides the
    one child that it has started itself; -1 where it does not adopt such processes."""
    adopts = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    if not adopts.value:
        return -1
    return sum(map(alive, children(os.getpid()))) - 1


def waits_in(pid: int) -> str:
    """The kernel function in which a process sleeps; empty where it runs or that is not known."""
    try:
        text = _told(pid, "wchan").strip()
    except OSError:
        return ""
    return "" if text == "0" else text


class Tree:
    """The tree of processes on this machine. The parent of a process is read once, as most of them
    belong to others and the tree is updated often."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def look(self) -> None:
        """Update the tree by the processes that have started and ended."""
        before, self._parents, self._children = self._parents, {}, {}
        for name in os.listdir(_PROC):
            if not name.isdecimal():
                continue
            pid = int(name)
            parent = before.get(pid)
            if parent is None:
                if (seen := stat(pid)) is None:
                    continue
                parent = seen.parent
            self._parents[pid] = parent
            self._children.setdefault(parent, []).append(pid)

    def memory(self, pid: int) -> Memory | None:
        """Memory of a process and its descendants; None where the process has ended."""
        own = _resident(pid)
        if own is None:
            return None
        below = self._below(pid)
        # A forked worker's shared pages belong to its parent: only the rest is its own.
        extra = [r[0] - r[1] for child in below if (r := _resident(child))]
        return Memory(own[0], sum(extra), (pid, *below))

    def _below(self, pid: int) -> list[int]:
        found: list[int] = []
        todo = [pid]
        while todo:
            children = self._children.get(todo.pop(), [])
            found += children
            todo += children
        return found


def _resident(pid: int) -> tuple[int, int] | None:
    """Resident bytes of a process, and how many of these are backed by files or shared memory."""
    try:
        fields = _told(pid, "statm").split()
    except OSError:
        return None
    return int(fields[1]) * _PAGE, int(fields[2]) * _PAGE


def private_memory(pid: int) -> tuple[int, int] | None:
    """Resident bytes of a process, and how many of these no other process has in use; None where
    the kernel does not tell. Takes milliseconds: the kernel visits each page."""
    try:
        text = _told(pid, "smaps_rollup")
    except OSError:
        return None
    found = re.findall(r"^(Rss|Private_Clean|Private_Dirty):\s+(\d+) kB", text, re.MULTILINE)
    sizes = {name: int(size) << 10 for name, size in found}
    return (sizes.pop("Rss"), sum(sizes.values())) if "Rss" in sizes else None


def control_group_memory() -> GroupMemory:
    """Memory limit, use and OOM kills of our control group (version 1 or 2)."""
    groups = _own_groups()
    for controllers, path in groups:
        if not controllers:
            root, *names = _GROUPS, "max", "current", "events"
        elif "memory" in controllers.split(","):
            root = _GROUPS / "memory"
            names = ["limit_in_bytes", "usage_in_bytes", "oom_control"]
        else:
            continue
        # Inside a container the path of the host is not there, but the root is ours.
        for folder in (root / path.lstrip("/"), root):
            limit, used, events = (folder / f"memory.{name}" for name in names)
            if used.exists():
                return GroupMemory(_number(limit), _number(used), _counter(events, "oom_kill"))
    kills = _counter(_PROC / "vmstat", "oom_kill") if groups else None
    return GroupMemory(oom_kills=kills)


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return value if value < _NO_LIMIT else None


def _counter(path: Path, name: str) -> int | None:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(p[1]) for p in pairs if len(p) == 2 and p[0] == name), None)
    except (OSError, ValueError):
        return None


class Gpus:
    """NVIDIA GPUs by NVML; where there are none, every method returns an empty result."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self.names: tuple[str, ...] = ()
        self.uuids: tuple[str, ...] = ()
        self.divided: tuple[str, ...] = ()
        self.memory: tuple[int, ...] = ()
        self.driver = ""
        self.trouble = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            count = pynvml.nvmlDeviceGetCount()
            self.driver = _text(pynvml.nvmlSystemGetDriverVersion())
            known = [gpu for i in range(count) if (gpu := self._gpu(i)) is not None]
            self._handles = [handle for handle, _, _ in known]
            self.names = tuple(name for _, name, _ in known)
            self.uuids = tuple(uuid for _, _, uuid in known)
            self.memory = self._totals()
            self.divided = tuple(uuid for h, _, uuid in known if self._is_divided(h))
        except Exception as error:  # no driver, or a library that does not fit it
            self._handles = self._handles if self.names else []
            if Path("/proc/driver/nvidia").exists():
                self.trouble = f"NVML does not answer: {error}"

    def _gpu(self, index: int) -> tuple[Any, str, str] | None:
        """Handle, name and UUID of a GPU; None of one that has failed, so that the others count."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(self._nvml.nvmlDeviceGetName(handle))
            return handle, name, _text(self._nvml.nvmlDeviceGetUUID(handle))
        except Exception as error:
            self.trouble = f"NVML does not answer about GPU {index}: {error}"
            return None

    def _is_divided(self, handle: Any) -> bool:
        """Whether a GPU is divided into instances (MIG), which NVML names as a whole."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except Exception:  # it cannot be divided
            return False

    def _totals(self) -> tuple[int, ...]:
        try:
            return tuple(int(self._nvml.nvmlDeviceGetMemoryInfo(h).total) for h in self._handles)
        except Exception:  # not supported here (MIG)
            return ()

    def by_process(self) -> dict[int, dict[int, int]]:
        """GPU memory in bytes, by pid and device index."""
        held: dict[int, dict[int, int]] = {}
        for index, handle in enumerate(self._handles):
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except Exception as error:
                self.trouble = f"NVML does not list processes: {error}"
                continue
            for process in (*running, *self._shared_by(handle)):
                # None under some drivers and virtual GPUs: a context is there, its size is unknown.
                held.setdefault(process.pid, {})[index] = process.usedGpuMemory or 0
        return held

    def _shared_by(self, handle: Any) -> list[Any]:
        """Processes that use a GPU through its MPS server, which is listed in their place."""
        try:
            return list(self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
        except Exception:  # there is no MPS, or the library is too old
            return []

    def used(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Memory in use in bytes, and utilisation in percent, by device."""
        used: list[int] = []
        busy: list[int] = []
        for handle in self._handles:
            try:
                used.append(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
                busy.append(int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
            except Exception:  # not supported here (MIG): nothing said of any
                return (), ()
        return tuple(used), tuple(busy)

    def close(self) -> None:
        if self._nvml:
            try:
                self._nvml.nvmlShutdown()
            except Exception:
                return


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
