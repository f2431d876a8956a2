"""A rank's program and threads, and whether it has a process group at all."""

from __future__ import annotations

from .base import Event


class ProgramSeen(Event, frozen=True, tag="program"):
    """The program's own files and the libraries it uses, at the first optimizer step.

    Attributes:
        files: digest by path, relative to the script's folder.
        versions: by package; only those that are loaded.
    """

    files: dict[str, str]
    versions: dict[str, str]


class TrainsAlone(Event, frozen=True, tag="trains-alone"):
    """One of several ranks took its first optimizer step without a process group.

    Recorded again if other means of communication are noticed later.

    Attributes:
        layers: communication libraries that are loaded (mpi4py, horovod, ...) or used (a store),
            and tensors that something other than an optimizer changes.
        init_site: the line of the program that calls `init_process_group`, and never ran, under
            `condition`; -1 for none.
    """

    step: int
    site: int
    layers: tuple[str, ...] = ()
    init_site: int = -1
    condition: str = ""

    def describe(self) -> str:
        return "trains without a process group"


class ThreadsSeen(Event, frozen=True, tag="threads"):
    """Threads of this process while it trains; recorded when they change.

    Attributes:
        compute: number of torch's compute threads.
        alive: number of all threads of the process.
        asked: the program or its environment chose `compute`; else it is torch's default.
        device: type of the device it trains on, `cpu` or `cuda`.
        site: the line that set `compute`, if `set_there`; else the line of the step.
        cpus: the cores that this process may run on.
    """

    compute: int
    alive: int
    asked: bool
    device: str
    site: int = -1
    cpus: tuple[int, ...] = ()
    set_there: bool = False
