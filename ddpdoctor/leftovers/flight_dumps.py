"""Dumps of torch's flight recorder: the last collectives of a rank, with their lines.

torch writes them with `pickle` when a watchdog's timeout expires, or as JSON on request. The pickle
is read by an unpickler that allows no globals: it cannot run code.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        op, peer: as in `Signature` and `Call`.
        backend: that made it.
        done: torch has seen its end.
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


@dataclass(frozen=True)
class Dump:
    """The calls of one rank.

    Attributes:
        groups: the members of each group by its name; empty where torch did not say.
        written: when the file was written, seconds since the epoch.
    """

    entries: tuple[Entry, ...]
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    written: float = 0.0

    @property
    def last(self) -> float:
        """When the last call was issued; 0 without any."""
        return max((e.at for e in self.entries), default=0.0)

    @property
    def waited_s(self) -> float:
        """How long the rank has been in its last call when the dump was written: no longer than the
        timeout and a minute, as files are copied later."""
        longest = max((e.timeout_s for e in self.entries), default=0.0) + 60.0
        return min(max(self.written - self.last, 0.0), longest)


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
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries"), list):
        raise DumpError("it is no dump of the flight recorder")
    entries = [e for raw in loaded["entries"] if (e := _entry(raw)) is not None]
    return Dump(tuple(entries), _groups(loaded), written)


def _entry(raw: Any) -> Entry | None:
    if not isinstance(raw, dict):
        return None
    backend, _, name = str(raw.get("profiling_name", "")).rpartition(":")
    peer = _PEER.search(name)
    p2p = bool(raw.get("is_p2p")) or peer is not None
    op = peer[1] if peer else name.partition(" ")[0]
    group = raw.get("process_group") or ("0", "")
    finished = bool(raw.get("retired")) or raw.get("state") == "completed"
    thread = str(raw.get("thread_name") or "")
    return Entry(
        group=str(group[0] if isinstance(group, (list, tuple)) else group),
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
    )


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
