"""What a look at a job from outside finds: ranks, their stacks, and the file that holds them."""

from __future__ import annotations

from pathlib import Path

import msgspec

KIND = "ddpdoctor-attach"
VERSION = 1


class RecordError(Exception):
    """A file is no record of `ddpdoctor attach --json`. One line."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of a Python stack; `source` is the text of the line where the file was found."""

    function: str
    file: str
    line: int
    source: str = ""


class Look(msgspec.Struct, frozen=True):
    """A thread of a process at one moment; innermost frame first."""

    frames: tuple[Frame, ...] = ()


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread of a rank besides the main one, with lines of the program in its stack.

    Attributes:
        looks, wakes, wanted, holds: as in `RankLook`.
    """

    name: str
    looks: tuple[Look, ...]
    wakes: float = 0.0
    wanted: float = 0.0
    holds: tuple[str, ...] = ()


class Worker(msgspec.Struct, frozen=True):
    """A worker of a DataLoader, or another child of a rank."""

    pid: int
    state: str
    cpu: float
    frames: tuple[Frame, ...] = ()


class RankLook(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process.

    Attributes:
        state: letter of `/proc/<pid>/stat`: `T` stopped, `Z` a zombie, else running or asleep.
        looks: of its main thread, the first and the last, and between them one that differs from
            the first; fewer where its stack could not be read.
        wakes: how often a second its main thread slept and went on meanwhile.
        wanted: share of the time in which that thread ran, or waited for a core.
        holds: what the `with` statements around the lines of its main thread have taken, and what
            was taken by `acquire()` there.
        cpu: cores that it used meanwhile; `gpu`, the largest load in percent of a GPU that it has
            in use, None where there is none.
        threads: its other threads with lines of the program.
        trouble: why its stack could not be read; empty where it was.
    """

    rank: int
    pid: int
    local_rank: int = -1
    state: str = "S"
    looks: tuple[Look, ...] = ()
    cpu: float = 0.0
    wakes: float = 0.0
    wanted: float = 0.0
    gpu: float | None = None
    holds: tuple[str, ...] = ()
    threads: tuple[Thread, ...] = ()
    workers: tuple[Worker, ...] = ()
    trouble: str = ""


class JobLook(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one job on one node, or of several nodes put together.

    Attributes:
        address: where the ranks meet, as their environment has it; tells jobs apart.
        launched: ranks that belong on these nodes, by their environment.
        world_size: 0 where it is not known.
        at: seconds since the epoch.
        apart_s: between the first look and the last of as many as `looks`.
    """

    address: str
    node: str
    world_size: int
    launched: int
    command: str
    at: float
    apart_s: float
    ranks: tuple[RankLook, ...]
    looks: int = 2


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file that `ddpdoctor attach --json` writes."""

    kind: str
    version: int
    jobs: tuple[JobLook, ...]


def write(jobs: tuple[JobLook, ...]) -> bytes:
    record = Record(kind=KIND, version=VERSION, jobs=jobs)
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def is_record(path: Path) -> bool:
    """Whether a file looks like one of `ddpdoctor attach --json`."""
    try:
        if not path.is_file():
            return False  # a pipe would wait for its other end
        with path.open("rb") as file:
            return KIND.encode() in file.read(200)
    except OSError:
        return False


def read(paths: list[Path]) -> list[JobLook]:
    """The jobs of several nodes' files; the parts of one job put together.

    Raises:
        RecordError: a file cannot be read, or is of another version.
    """
    found: dict[str, list[JobLook]] = {}
    for path in paths:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError) as error:
            raise RecordError(f"{path} is no record of `ddpdoctor attach --json`") from error
        if (record.kind, record.version) != (KIND, VERSION):
            raise RecordError(f"{path} was written by another version of ddpdoctor")
        for job in record.jobs:
            found.setdefault(job.address, []).append(job)
    return [_together(parts) for parts in found.values()]


def _together(parts: list[JobLook]) -> JobLook:
    ranks = {rank.rank: rank for part in parts for rank in part.ranks}
    nodes = list(dict.fromkeys(part.node for part in parts))
    return msgspec.structs.replace(
        parts[0],
        node=", ".join(nodes),
        world_size=max(part.world_size for part in parts),
        launched=sum(part.launched for part in {p.node: p for p in parts}.values()),
        ranks=tuple(ranks[number] for number in sorted(ranks)),
    )
