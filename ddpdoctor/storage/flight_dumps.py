"""Dumps of torch's flight recorder: the last collectives of a rank, with their lines.

torch writes them with `pickle` when a watchdog's timeout expires, or as JSON on request. The pickle
is read by an unpickler that allows no globals: it cannot run code.

Its fields, as far as they mislead: `pg_status` goes by the group's `pg_id`, not by its name. NCCL's
watchdog calls `retired` what it let go of, done or timed out. `started` is seen only where timing
is on, so that of the unfinished entries of a group only the earliest means anything. A coalesced
call has one number for all its parts. Sends and receives have numbers of their own.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..events import FlightEntry, FlightLog

PREFIX = "flight-rank-"
"""Begin of the name of a dump in a run folder; torch puts the number of the rank behind it."""

KEPT = 64
"""Latest collectives, and messages, of each group that a `FlightLog` has."""

LARGEST = 256 << 20
"""Bytes of a dump; a larger one is none."""

NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "allreduce": "all_reduce",
}
"""Names of the backends for collectives, where they differ from those of `torch.distributed`."""

_PEER = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


class DumpError(ValueError):
    """A file is no dump of the flight recorder, or cannot be read to its end."""


@dataclass(frozen=True)
class Entry:
    """One call.

    Attributes:
        group: torch's name of the group.
        sequence: its number in the group, from 1; -1 for a point-to-point call.
        part: tells the parts of a coalesced call apart.
        op, peer: as in `Signature` and `Call`.
        backend: that made it.
        done: torch has seen its end; not where the watchdog gave it up.
        at: when it was issued, seconds since the epoch.
        frames: (file, line, function), innermost first.
        thread: its name; empty for the main thread.
    """

    group: str
    sequence: int
    op: str
    backend: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    done: bool
    at: float
    frames: tuple[tuple[str, int, str], ...] = ()
    thread: str = ""
    peer: int = -1
    timeout_s: float = 0.0
    part: int = 0


@dataclass(frozen=True)
class Dump:
    """The calls of one rank.

    Attributes:
        groups: the members of each group by its name; empty where torch did not say.
        status: by group, the numbers of the last collectives enqueued and completed.
        written: when the file was written, seconds since the epoch.
    """

    entries: tuple[Entry, ...]
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    status: dict[str, tuple[int, int]] = field(default_factory=dict)
    written: float = 0.0

    @property
    def last(self) -> float:
        """When the last call was issued; 0 without any."""
        return max((e.at for e in self.entries), default=0.0)

    def logs(self, at: float) -> Iterator[FlightLog]:
        """What is recorded of each group, in the order in which calls were issued.

        Args:
            at: when the dump was made, on the clock of the rank.
        """
        for group in dict.fromkeys(entry.group for entry in self.entries):
            mine = [entry for entry in self.entries if entry.group == group]
            calls = {(e.sequence, e.part): e for e in mine if e.sequence >= 0}
            messages = [e for e in mine if e.sequence < 0]
            enqueued, completed = self.status.get(group, (-1, -1))
            yield FlightLog(
                at=at,
                group=group,
                entries=tuple(_flight_entry(calls[place]) for place in sorted(calls))[-KEPT:],
                messages=tuple(map(_flight_entry, messages))[-KEPT:],
                last_enqueued=enqueued,
                last_completed=completed,
                backend=mine[0].backend,
            )


def _flight_entry(entry: Entry) -> FlightEntry:
    return FlightEntry(
        sequence=entry.sequence,
        op=entry.op,
        sizes=str([list(size) for size in entry.sizes])[:200],
        dtypes=",".join(entry.dtypes)[:100],
        retired=entry.done,
        peer=entry.peer,
    )


def beside(rank_file: Path, rank: int) -> Path | None:
    """The dump that torch left of a rank, whose records are in a file of a run folder."""
    folder = rank_file.parent
    # The variables are set once for all attempts of a launcher, whose folders are inside.
    for place in (folder, folder.parent) if folder.name.startswith("restart-") else (folder,):
        path = place / f"{PREFIX}{rank}"
        if path.is_file() and not path.is_symlink():
            return path
    return None


class _NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise DumpError(f"it holds an object of {module}.{name}, which no dump does")


def read_dump(path: Path) -> Dump:
    """The dump in a file.

    Raises:
        DumpError: it is none, or is cut short; why, as a clause.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise DumpError("it is too large for a dump")
        content, written = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        raise DumpError(f"it cannot be read ({error.strerror})") from error
    if not content.lstrip()[:1] == b"{" and not content[:1] == b"\x80":
        raise DumpError("it is no dump of the flight recorder")
    try:
        if content[:1] == b"\x80":
            loaded = _NoGlobals(io.BytesIO(content)).load()
        else:
            loaded = json.loads(content)
    except DumpError:
        raise
    except Exception as error:
        raise DumpError("it is cut short or damaged") from error
    return parse(loaded, written)


def parse(loaded: Any, written: float = 0.0) -> Dump:
    """A dump in the form in which torch gives it.

    Raises:
        DumpError: it is none.
    """
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries", ()), (list, tuple)):
        raise DumpError("it is no dump of the flight recorder")
    rows = [raw for raw in loaded.get("entries", ()) if isinstance(raw, dict)]
    return Dump(tuple(map(_entry, rows)), _groups(loaded), _status(loaded, rows), written)


def _entry(raw: dict[str, Any]) -> Entry:
    backend, _, name = str(raw.get("profiling_name", "")).rpartition(":")
    peer = _PEER.search(name)
    p2p = bool(raw.get("is_p2p")) or peer is not None
    op = peer[1] if peer else name.partition(" ")[0]
    finished = raw.get("state") == "completed" or bool(raw.get("time_discovered_completed_ns"))
    if backend != "nccl":
        finished |= bool(raw.get("retired"))
    thread = str(raw.get("thread_name") or "")
    return Entry(
        group=_group(raw),
        sequence=-1 if p2p else _integer(raw.get("collective_seq_id")),
        op=NAMES.get(op, op),
        backend=backend,
        sizes=_sizes(raw.get("input_sizes")),
        dtypes=tuple(map(str, _listed(raw.get("input_dtypes")))),
        done=finished,
        at=_integer(raw.get("time_created_ns")) / 1e9,
        frames=tuple(
            (str(f.get("filename", "")), _integer(f.get("line")), str(f.get("name", "")))
            for f in _listed(raw.get("frames"))
            if isinstance(f, dict)
        ),
        thread="" if thread in ("", "python", "pt_main_thread") else thread,
        peer=int(peer[2]) if peer else -1,
        timeout_s=_integer(raw.get("timeout_ms")) / 1e3,
        part=_integer(raw.get("op_id")),
    )


def _group(raw: dict[str, Any]) -> str:
    """torch's name of an entry's group."""
    group = raw.get("process_group") or ("0", "")
    return str(group[0] if isinstance(group, (list, tuple)) else group)


def _status(loaded: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    known = loaded.get("pg_status")
    known = known if isinstance(known, dict) else {}
    numbers = {_group(raw): str(raw.get("pg_id", _group(raw))) for raw in rows}
    found: dict[str, tuple[int, int]] = {}
    for group, number in numbers.items():
        state = known.get(number)
        if isinstance(state, dict):
            last = (state.get(f"last_{what}_collective", -1) for what in ("enqueued", "completed"))
            enqueued, completed = (n if isinstance(n, int) else -1 for n in last)
            found[group] = enqueued, completed
    return found


def _groups(loaded: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    configs = loaded.get("pg_config")
    found: dict[str, tuple[int, ...]] = {}
    for name, config in configs.items() if isinstance(configs, dict) else ():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        try:
            members = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
            # gloo has no name for its only group.
            found[str(name) or "0"] = tuple(int(r) for r in members or ())
        except (ValueError, SyntaxError, TypeError):
            continue
    return found


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    rows = [row for row in _listed(value) if isinstance(row, (list, tuple))]
    return tuple(tuple(_integer(n) for n in row) for row in rows)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0
