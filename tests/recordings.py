"""Runs made of literal events, without spawning a rank.

    run = make_run({0: [site(1, "train.py", 88, "optimizer.step()"), *steps(10, site=1)],
                    1: steps(9)}, ended={1: -9})
    (finding,) = RankDied().examine(run)

Everything goes through a real folder and its reader, so that what a test sees is what
`ddpdoctor report` would see. What is left out is filled in as in a run that ended well:

- `RankStarted` in front, unless the list holds one (`started(...)` makes one to change);
- `at`: events written with `at=0` follow each other at `TICK` seconds from `START`;
- `ProcessEnded` with status 0 for every rank; `ended={1: -9, 2: 1, 3: None}` says otherwise
  (a signal, a status, no end on record), `ended=None` leaves out all of them;
- `run.json`; fields of `RunInfo` may be given by name, `info=False` leaves the file out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import msgspec

from ddpdoctor.events import (
    SCHEMA,
    Event,
    MonitorStarted,
    ProcessEnded,
    RankStarted,
    Site,
    StepDone,
    Stopped,
    TorchLoaded,
    encode,
)
from ddpdoctor.run import Run, load
from ddpdoctor.storage.call_ring import RingWriter
from ddpdoctor.storage.run_folder import EventWriter, RunFolder, RunInfo, rank_stem

START = 1000.0
"""Where the ranks' clock begins."""
TICK = 0.01
WALL = 1_750_000_000.0
"""Seconds since the epoch at `START`."""
CWD = "/home/user/project"
HOST = "host"
PID = 5000
"""Rank R has pid `PID + R`."""

ALL_WELL: Mapping[int, int | None] = {}

Events = Iterable[Event]


def make_run(
    ranks: Mapping[int, Events],
    *,
    ended: Mapping[int, int | None] | None = ALL_WELL,
    stopped: str = "",
    nodes: Mapping[int, Events] | None = None,
    twins: Mapping[int, Sequence[Events]] | None = None,
    world_size: int | None = None,
    **info: object,
) -> Run:
    """The run that these events are. See `write_folder` for the arguments."""
    with tempfile.TemporaryDirectory() as folder:
        written = write_folder(
            Path(folder) / "run",
            ranks,
            ended=ended,
            stopped=stopped,
            nodes=nodes,
            twins=twins,
            world_size=world_size,
            **info,
        )
        return load([written])


def write_folder(
    path: Path,
    ranks: Mapping[int, Events],
    *,
    ended: Mapping[int, int | None] | None = ALL_WELL,
    stopped: str = "",
    nodes: Mapping[int, Events] | None = None,
    twins: Mapping[int, Sequence[Events]] | None = None,
    world_size: int | None = None,
    attempt: int = 0,
    info: bool = True,
    **fields: object,
) -> RunFolder:
    """Write a run folder; call it again with `attempt=1` for what a restart left.

    Args:
        ranks: rank to its events; a rank that is left out left no record.
        stopped: who stopped the run (`doctor`, `interrupt`, `terminate`).
        nodes: node rank to what its monitor saw beside the ends of processes.
        twins: rank to the events of further processes that claimed the same rank.
        world_size: default: the number of ranks given (the largest plus one).
        fields: of `RunInfo`.
    """
    size = world_size if world_size is not None else max(ranks, default=-1) + 1
    folder = RunFolder(path)
    folder.attempt_path(attempt).mkdir(parents=True, exist_ok=True)
    status = {} if ended is None else {rank: ended.get(rank, 0) for rank in ranks}
    if info:
        folder.write_info(run_info(size, **{**_ending(status), **fields}))
    for rank, events in ranks.items():
        stem = folder.attempt_path(attempt) / rank_stem(rank, size)
        _write(stem, rank_events(events, rank, size, attempt=attempt))
        for number, more in enumerate((twins or {}).get(rank, ()), 1):
            pid = PID + 1000 * number + rank
            twin = stem.with_name(f"{stem.name}.pid-{pid}")
            _write(twin, rank_events(more, rank, size, attempt=attempt, pid=pid))
    seen: dict[int, list[Event]] = {n: list(e) for n, e in (nodes or {}).items()}
    seen.setdefault(0, []).extend(ends(status, attempt=attempt))
    if stopped:
        seen.setdefault(0, []).append(Stopped(at=0, by=stopped))
    for node, events in seen.items():
        _append(folder.node_path(node), [monitor(node), *events])
    return folder


def _ending(status: Mapping[int, int | None]) -> dict[str, object]:
    """What `run.json` says of the end; nothing where a rank's end is not on record."""
    if not status or None in status.values():
        return {"ended_at": None, "exit_code": None}
    return {"exit_code": next((code for code in status.values() if code), 0)}


def rank_events(
    events: Events, rank: int, world_size: int, *, attempt: int = 0, pid: int | None = None
) -> list[Event]:
    """The events of one rank, completed: started, and every `at` filled in."""
    listed = list(events)
    if not any(isinstance(e, RankStarted) for e in listed):
        listed.insert(0, started(rank, world_size, attempt=attempt))
    if pid is not None:
        listed = [
            msgspec.structs.replace(e, pid=pid) if isinstance(e, RankStarted) else e for e in listed
        ]
    return _timed(listed)


def started(rank: int, world_size: int, **fields: object) -> RankStarted:
    """The first record of a rank; any field may be given."""
    values: dict[str, object] = {
        "at": START,
        "schema": SCHEMA,
        "wall": WALL,
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "pid": PID + rank,
        "node": HOST,
        "argv": ("train.py",),
        "cwd": CWD,
        "python": "3.11.4",
        "cores": 8,
    }
    return RankStarted(**{**values, **fields})  # type: ignore[arg-type]


def ring_of(rank: int, path: Path) -> RingWriter:
    """The ring of the process that `started` makes for this rank, beside its event file."""
    with mock.patch.object(os, "getpid", return_value=PID + rank):
        return RingWriter(path.with_suffix(".ring"))


def torch_loaded(version: str = "2.13.0", **fields: object) -> TorchLoaded:
    return TorchLoaded(at=0, torch=version, **fields)  # type: ignore[arg-type]


def site(number: int, file: str, line: int, text: str = "", function: str = "main") -> Site:
    """A line of the user's code; events refer to it by `number`."""
    return Site(at=0, id=number, file=f"{CWD}/{file}", line=line, function=function, text=text)


def steps(
    count: int, *, first: int = 0, optimizer: int = 0, site: int = -1, **fields: object
) -> list[StepDone]:
    """`count` optimizer steps of 0.1 s, numbered from `first`."""
    values: dict[str, object] = {"wall_s": 0.1, "backwards": 1, "synced": 1, **fields}
    return [
        StepDone(at=0, optimizer=optimizer, step=n, site=site, **values)  # type: ignore[arg-type]
        for n in range(first, first + count)
    ]


def ends(status: Mapping[int, int | None], *, attempt: int = 0) -> list[ProcessEnded]:
    """How ranks ended: an exit status, minus a signal's number, or None for no record."""
    return [
        ProcessEnded(
            at=START + 60,
            rank=rank,
            pid=PID + rank,
            wall=WALL + 60,
            status=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            attempt=attempt,
        )
        for rank, code in status.items()
        if code is not None
    ]


def monitor(node: int = 0, **fields: object) -> MonitorStarted:
    values: dict[str, object] = {
        "at": START,
        "schema": SCHEMA,
        "wall": WALL,
        "node": HOST if not node else f"{HOST}{node}",
        "node_rank": node,
        "pid": PID - 1,
    }
    return MonitorStarted(**{**values, **fields})  # type: ignore[arg-type]


def run_info(world_size: int, **fields: object) -> RunInfo:
    values: dict[str, object] = {
        "schema_version": SCHEMA,
        "id": "20250615-150640-train",
        "command": ["ddpdoctor", "run", "train.py"],
        "started_at": "2025-06-15T15:06:40+00:00",
        "ended_at": "2025-06-15T15:07:40+00:00",
        "tool_version": "0.1.0",
        "world_size": world_size,
        "torch": "2.13.0",
        "exit_code": 0,
    }
    return RunInfo(**{**values, **fields})  # type: ignore[arg-type]


def _timed(events: list[Event]) -> list[Event]:
    """Fill in every `at` that is 0: one `TICK` after the event before it."""
    clock, timed = START, []
    for event in events:
        if event.at == 0:
            event = msgspec.structs.replace(event, at=clock + TICK)
        clock = event.at
        timed.append(event)
    return timed


def _write(stem: Path, events: list[Event]) -> None:
    writer = EventWriter(stem.with_name(f"{stem.name}.jsonl"), stem.with_name(f"{stem.name}.log"))
    for event in events:
        writer.write(event)
    writer.close()


def _append(path: Path, events: list[Event]) -> None:
    with path.open("ab") as file:
        file.writelines(encode(event) for event in _timed(events))
