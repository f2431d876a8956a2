"""What a rank runs with: its program, its threads, whether it trains with the others at all."""

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
    """The first optimizer step of a rank of several, with no process group to share it through.

    Told again where other means of communication show only later.

    Attributes:
        layers: those that the program has loaded (mpi4py, horovod, ...) or uses (a store), and what
            something else than an optimizer changes.
    """

    step: int
    site: int
    layers: tuple[str, ...] = ()

    def describe(self) -> str:
        return "trains without a process group"


class ThreadsSeen(Event, frozen=True, tag="threads"):
    """Threads of this process while it trains; recorded when they change.

    Attributes:
        compute: threads that torch computes with.
        alive: all threads that exist.
        asked: the program or its environment chose that number; else it is torch's default.
        device: where it trains, `cpu` or `cuda`.
        site: the line that set it, where `set_there`; else that of the step.
        cpus: the cores that this process may run on.
    """

    compute: int
    alive: int
    asked: bool
    device: str
    site: int = -1
    cpus: tuple[int, ...] = ()
    set_there: bool = False
