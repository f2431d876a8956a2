"""Writes down what a run left behind as a run folder, so that the checks judge it like any other.

What is not known stays unknown: ranks without a dump have no calls, and tracebacks without a time
are told in the order of the ranks.
"""

from __future__ import annotations

import linecache
import os
import time
from pathlib import Path

from .._version import __version__
from ..events import (
    SCHEMA,
    CallBlock,
    CallRun,
    CallSite,
    Event,
    ExceptionRaised,
    GroupReady,
    MonitorStarted,
    Place,
    ProcessEnded,
    ProcessStarted,
    RankExiting,
    RankStarted,
    Signature,
    Site,
    StallSeen,
    TorchLoaded,
)
from ..events.calls import CALLERS
from ..events.process import Frame
from ..storage.call_ring import Phase, RingWriter, State
from ..storage.flight_dumps import Dump, Entry
from ..storage.run_folder import LEFT_BEHIND, EventWriter, RunFolder, RunInfo, rank_stem
from .search import Leftovers

NODE = "unknown"
STOOD_S = 10.0
"""How long ranks have stood still when dumps were written, for checks that ask for some time: no
file says it, so that it is never told."""
BEGAN = 100.0
"""The time on the ranks' own clocks at which the first call was made."""


def write_folder(path: Path, found: Leftovers) -> RunFolder:
    """Write what was found as a run folder."""
    folder = RunFolder.create(path)
    times = [e.at for d in found.dumps.values() for e in d.entries if e.at]
    times += [r.at for r in found.raised.values() if r.at]
    began = min(times, default=time.time())
    last = max(times, default=began)
    members = {r for d in found.dumps.values() for ranks in d.groups.values() for r in ranks}
    world = max([*found.ranks, *members], default=0) + 1
    for rank in found.ranks:
        _write_rank(folder, found, rank, world, began)
    node = EventWriter(folder.node_path(0))
    node.write(MonitorStarted(at=0.0, schema=SCHEMA, wall=began - BEGAN, node=NODE, node_rank=0,
                              pid=0))  # fmt: skip
    for rank in range(world):
        node.write(
            ProcessStarted(at=0.0, rank=rank, local_rank=rank, pid=os.getpid(), wall=began - BEGAN)
        )
    end = last - began + BEGAN
    waits = any(not e.done for d in found.dumps.values() for e in d.entries)
    hung = waits and not _failed(found)
    if hung:
        node.write(StallSeen(at=end + STOOD_S, since=end, hang_after=STOOD_S))
    for rank in found.ranks:
        node.write(_end(found, rank, began, end))
    backend = next((e.backend for d in found.dumps.values() for e in d.entries if e.backend), "")
    folder.write_info(
        RunInfo(
            schema_version=SCHEMA,
            id="leftovers",
            command=["(run without the doctor)"],
            started_at="",
            tool_version=__version__,
            world_size=world,
            node=NODE,
            outcome="hung" if hung else "failed" if _failed(found) else "incomplete",
            launcher=f"{LEFT_BEHIND} ({backend or 'logs'})",
        )
    )
    return folder


def _failed(found: Leftovers) -> bool:
    return bool(found.raised or found.codes)


def _end(found: Leftovers, rank: int, began: float, end: float) -> ProcessEnded:
    """How a rank ended; `silent` where nothing tells."""
    code = found.codes.get(rank)
    told = found.raised.get(rank)
    # The dump was written first.
    last = end + (STOOD_S if code is None else 0.0)
    at = (told.at - began + BEGAN if told and told.at else last) + 0.1
    return ProcessEnded(
        at=at,
        rank=rank,
        pid=os.getpid(),
        wall=began - BEGAN + at,
        status=None if code is None or code < 0 else code,
        signal=-code if code is not None and code < 0 else None,
        by_launcher=code == -15,
        silent=code is None,
    )


def _write_rank(folder: RunFolder, found: Leftovers, rank: int, world: int, began: float) -> None:
    stem = folder.path / rank_stem(rank, world)
    writer = EventWriter(stem.with_suffix(".jsonl"))
    raised = found.raised.get(rank)
    # The ring is known by the process that wrote it.
    writer.write(
        RankStarted(
            at=0.0, schema=SCHEMA, wall=began - BEGAN, rank=rank, local_rank=rank,
            world_size=world, pid=os.getpid(), node=NODE, cwd=os.getcwd(),
        )
    )  # fmt: skip
    writer.write(TorchLoaded(at=0.0, torch=""))
    sites = _Sites(writer)
    dump = found.dumps.get(rank)
    if dump is not None:
        _write_calls(writer, sites, stem, dump, rank, world, began)
    if raised is not None:
        frames = tuple(
            Frame(file=file, line=line, function=function, user=_is_users(file))
            for file, line, function in raised.frames
        )
        for file, line, function in raised.frames:
            sites.number(file, line, function)
        at = raised.at - began + BEGAN if raised.at else BEGAN + 1 + rank / 1e3
        writer.write(ExceptionRaised(at=at, kind=raised.kind, message=raised.message,
                                     frames=frames))  # fmt: skip
        writer.write(RankExiting(at=at + 0.01, how="exception", status=1))


class _Sites:
    """Numbers lines of code, and records them."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._known: dict[tuple[str, int], int] = {}

    def number(self, file: str, line: int, function: str) -> int:
        key = file, line
        if key not in self._known:
            self._known[key] = len(self._known)
            text = linecache.getline(file, line).rstrip()[:500]
            self._writer.write(
                Site(at=0.0, id=self._known[key], file=file, line=line, function=function,
                     text=text)
            )  # fmt: skip
        return self._known[key]


def _write_calls(
    writer: EventWriter,
    sites: _Sites,
    stem: Path,
    dump: Dump,
    rank: int,
    world: int,
    began: float,
) -> None:
    groups: dict[str, int] = {}
    known: dict[object, int] = {}
    ring = RingWriter(stem.with_suffix(".ring"))
    events: list[Event] = []
    seen: set[tuple[str, int]] = set()
    last = BEGAN
    for entry in sorted(dump.entries, key=lambda e: e.at):
        if entry.sequence >= 0 and (entry.group, entry.sequence) in seen:
            continue  # a part of a coalesced call
        seen.add((entry.group, entry.sequence))
        at = entry.at - began + BEGAN
        group = groups.get(entry.group)
        if group is None:
            group = groups[entry.group] = len(groups)
            ranks = dump.groups.get(entry.group) or tuple(range(world))
            writer.write(
                GroupReady(at=at, group=group, name=entry.group, backend=entry.backend,
                           ranks=ranks, member=True, site=-1)
            )  # fmt: skip
        signature, call = _signature(writer, known, entry, at), _site(writer, sites, known, entry)
        index = entry.sequence - 1 if entry.sequence > 0 else -1
        if index >= 0:
            block = known.setdefault(("block", signature, call), len(known))
            events += [
                CallBlock(at=at, id=block, codes=(signature, call)),
                CallRun(at=at, group=group, first=index, block=block, repeat=1, step=0, every=1),
            ]
        number = ring.write(group, index, signature, call, entry.peer, at)
        if entry.done:
            ring.done(number, at)
        elif entry.op in ("isend", "irecv"):
            ring.mark(number, State.RETURNED)
        last = max(last, at)
    for event in events:
        writer.write(event)
    ring.enter(Phase.USER, -1, last)


def _signature(writer: EventWriter, known: dict[object, int], entry: Entry, at: float) -> int:
    key = "signature", entry.op, entry.sizes, entry.dtypes
    if key not in known:
        known[key] = len(known)
        one = entry.sizes[0] if len(entry.sizes) == 1 else ()
        numel = 1
        for size in one:
            numel *= size
        sized = len(entry.sizes) == 1
        writer.write(
            Signature(
                at=at, id=known[key], op=entry.op, numel=numel if sized else -1,
                dtype=entry.dtypes[0].lower() if sized and entry.dtypes else "", shape=one,
            )
        )  # fmt: skip
    return known[key]


def _site(writer: EventWriter, sites: _Sites, known: dict[object, int], entry: Entry) -> int:
    lines = [frame for frame in entry.frames if _is_users(frame[0])][:CALLERS]
    key = "site", tuple(lines), entry.thread  # without lines: a dump that was made without stacks
    if key not in known:
        known[key] = len(known)
        places = tuple(Place(sites.number(*line)) for line in lines)
        writer.write(CallSite(at=0.0, id=known[key], places=places, thread=entry.thread))
    return known[key]


def _is_users(file: str) -> bool:
    parts = Path(file).parts
    library = any(p in ("site-packages", "dist-packages") for p in parts)
    own = any(p.startswith("python3") for p in parts[:-1])
    return not (library or own or file.startswith("<"))
