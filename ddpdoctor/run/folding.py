"""Large runs: ranks that did the same are folded when they are read.

Of each rank a *sketch* is made from the lines of its file, of which hardly any are decoded. Ranks
with equal sketches did the same, as far as records go that most ranks have in common; times, sizes
and other measured numbers differ on every rank. Of such ranks a few are read whole, and those that
are at the ends of what was measured: slowest, fastest, largest. Checks see these. The others
are `Run.folded`: what they did is known, and of their own they have what they read of the data.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..events import (
    EpochBegan,
    EpochEnded,
    Event,
    IndicesRead,
    InitEntered,
    LoaderSeen,
    MemorySample,
    Pace,
    RankExiting,
    RankStarted,
    StepDone,
    TimeLedger,
    decode,
)
from ..events.json_text import UNREADABLE
from ..storage.call_ring import Ring, read_ring
from ..storage.run_folder import read_plain
from .phrases import Fold
from .rank import Rank

FOLD_FROM = 64
"""Fewer ranks are all read whole."""

KEPT = 4
"""So many of the ranks that did the same are read whole, and more where they are remarkable."""

PER_WORKER = 256
"""Fewer ranks than this are not worth a process."""

MOST_VALUES = 32
"""What has more values than that, none of them on half of the ranks, is a rank's own by nature."""

OWN = (RankStarted, InitEntered, LoaderSeen, EpochBegan, EpochEnded, IndicesRead, RankExiting)
"""What every rank has of its own: what it is, and which share of the data it read."""

_OWN_TAGS = {str(kind.__struct_config__.tag).encode() for kind in OWN}
_STEP, _LEDGER, _MEMORY, _PACE = (
    str(kind.__struct_config__.tag).encode() for kind in (StepDone, TimeLedger, MemorySample, Pace)
)
SAMPLES = b'{"event":"rank-sample","rank":'
"""How the lines begin that a monitor writes of each rank every second."""

_BEGIN = b'{"event":"'
_AT = b',"at":'
_STEPS = re.compile(rb'"optimizer":(\d+),"step":(\d+)')
_WALL_S = re.compile(rb'"wall_s":([\d.e-]+)')
_WAITED_S = re.compile(rb'"waited_s":([\d.e-]+)')
_BACKWARDS = re.compile(rb'"backwards":(\d+)(?:,"synced":(\d+))?')


@dataclass
class Sketch:
    """A rank, as far as its file shows without being read whole.

    Attributes:
        did: what it did, by kind of record; equal values mean the same.
        took: what was measured of it: seconds and bytes.
        own: its events of `OWN`.
    """

    rank: int
    path: Path
    did: dict[Hashable, Hashable] = field(default_factory=dict)
    took: tuple[float, ...] = ()
    own: list[Event] = field(default_factory=list)


def sketches_of(files: Sequence[tuple[int, Path]]) -> Iterator[Sketch]:
    """A sketch of each of the ranks that has one. Of many ranks they are made by several processes,
    as far as this one can be forked: it has no other threads."""
    workers = min(len(os.sched_getaffinity(0)), len(files) // PER_WORKER)
    parts = [files[n::workers] for n in range(workers)] if threading.active_count() == 1 else ()
    if len(parts) < 2:
        yield from _sketched(files)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        yield from sorted(chain(*pool.map(_sketched, parts)), key=lambda s: s.rank)


def _sketched(files: Sequence[tuple[int, Path]]) -> list[Sketch]:
    sketcher = Sketcher()
    return [made for number, path in files if (made := sketcher.sketch(number, path)) is not None]


class Sketcher:
    """Makes sketches. It learns which kinds of records differ on every rank, and leaves them out
    from then on."""

    def __init__(self) -> None:
        self._seen: dict[bytes, set[int]] = defaultdict(set)
        self._count = 0

    def sketch(self, rank: int, path: Path) -> Sketch | None:
        """None for a file that is cut short or damaged, or is not there."""
        data = read_plain(path)
        if not data or not data.endswith(b"\n"):
            return None
        by_tag: dict[bytes, list[bytes]] = defaultdict(list)
        begin = len(_BEGIN)
        for line in data.split(b"\n"):
            by_tag[line[begin : line.find(b'"', begin)]].append(line)
        by_tag.pop(b"", None)
        made = Sketch(rank, path)
        try:
            self._fill(made, by_tag)
        except (*UNREADABLE, ValueError):
            return None
        self._count += 1
        return made if made.own and isinstance(made.own[0], RankStarted) else None

    def _fill(self, made: Sketch, by_tag: Mapping[bytes, list[bytes]]) -> None:
        for tag, lines in by_tag.items():
            if tag in _OWN_TAGS:
                made.own += map(decode, lines)
            elif tag == _STEP:
                made.did[tag] = _steps(lines)
            elif not self._individual(tag):
                made.did[tag] = value = hash(b"".join([x[: x.rfind(_AT)] for x in lines]))
                self._seen[tag].add(value)
            made.did[tag, "count"] = len(lines) if len(lines) < 2 else 2
        made.own.sort(key=lambda e: e.at)
        for event in made.own:
            if isinstance(event, RankStarted):
                made.did.update((("set", k), v) for k, v in event.environment.items())
                made.did["program"] = event.argv, event.python, event.script_digest, event.cwd
            elif isinstance(event, InitEntered):
                claimed = event.rank if event.rank >= 0 else event.env_rank
                made.did["init"] = claimed == made.rank, event.backend, event.timeout_s
            elif isinstance(event, LoaderSeen):
                made.did["loader", event.loader] = event.dataset, event.length, event.replicas
            elif isinstance(event, EpochEnded):
                made.did["epoch", event.loader, event.epoch] = event.batches, event.samples
            elif isinstance(event, RankExiting):
                made.did["exit"] = event.how, event.status
        ring = read_ring(made.path.with_suffix(".ring"))
        made.did["ring"] = _position(made.rank, ring) if ring is not None else None
        slow, waited = (
            [float(s) for s in found.findall(b"".join(by_tag.get(tag, ())))]
            for tag, found in ((_STEP, _WALL_S), (_PACE, _WAITED_S))
        )
        made.took = (
            _last_at(by_tag),
            *_seconds(by_tag),
            _bytes(by_tag),
            max(slow[1:], default=0.0),
            max(waited, default=0.0),
            min(waited, default=0.0),
        )

    def _individual(self, tag: bytes) -> bool:
        return self._count > 2 * MOST_VALUES and len(self._seen[tag]) > self._count // 2


def _steps(lines: Sequence[bytes]) -> Hashable:
    """Of each optimizer the last step, and how many backwards there were and communicated."""
    last: dict[bytes, bytes] = {}
    for line in lines[-8:]:
        if found := _STEPS.search(line):
            last[found[1]] = found[2]
    every = _BACKWARDS.findall(b"".join(lines))
    return (
        tuple(sorted(last.items())),
        sum(int(made) for made, _ in every),
        sum(int(synced or 0) for _, synced in every),
    )


def _position(rank: int, ring: Ring) -> Hashable:
    """Where a rank stands; the rank itself where it talks to single other ones."""
    calls = ring.last_calls
    last = calls[-1] if calls else None
    if last is None:
        return ring.phase, ring.phase_site, ring.count
    talks = rank if any(c.peer >= 0 for c in calls) else -1
    state = last.group, last.index, last.signature, last.site, last.state
    return ring.phase, ring.phase_site, ring.count, ring.step, state, talks


def _last_at(by_tag: Mapping[bytes, list[bytes]]) -> float:
    ends = (lines[-1] for lines in by_tag.values())
    return max(float(end[end.rfind(_AT) + len(_AT) : -1]) for end in ends)


def _seconds(by_tag: Mapping[bytes, list[bytes]]) -> tuple[float, ...]:
    """By phase, and in all: the rank's own seconds, and those it waited."""
    own: Counter[int] = Counter()
    waited = doctor = 0.0
    for line in by_tag.get(_LEDGER, ())[-1:]:
        if isinstance(event := decode(line), TimeLedger):
            doctor = event.doctor_s
            for account in event.accounts:
                own[account.phase] += account.own_s  # type: ignore[assignment]
                waited += account.waited_s
    return (waited, doctor, *(float(own[phase]) for phase in range(8)))


def _bytes(by_tag: Mapping[bytes, list[bytes]]) -> float:
    for line in by_tag.get(_MEMORY, ())[-1:]:
        if isinstance(event := decode(line), MemorySample):
            return float(max(event.peak_rss_bytes or 0, event.device_peak_bytes or 0))
    return 0.0


class Folding:
    """Which of the ranks of one attempt are folded.

    Attributes:
        kept: the ranks to be read whole.
        models: by folded rank, one that did the same and is read whole.
    """

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self.folds: list[Fold] = []
        self.models: dict[int, int] = {}
        self._shared = _shared(sketches)
        self._sketches = {s.rank: s for s in sketches}
        remarkable = _remarkable(sketches)
        for alike in self._classes(sketches):
            kept = {s.rank for s in alike[:KEPT]} | {s.rank for s in alike if s.rank in remarkable}
            others = tuple(s.rank for s in alike if s.rank not in kept)
            if others:
                self.folds.append(Fold(frozenset(kept), others))
                self.models.update(dict.fromkeys(others, alike[0].rank))

    def _classes(self, sketches: Sequence[Sketch]) -> Iterable[list[Sketch]]:
        classes: dict[Hashable, list[Sketch]] = defaultdict(list)
        for sketch in sketches:
            did = frozenset((k, v) for k, v in sketch.did.items() if k in self._shared)
            classes[did].append(sketch)
        return classes.values()

    def fill(self, rank: Rank, model: Rank) -> list[Event]:
        """Make `rank` one that did what `model` did. Returns its own events."""
        rank.take_from(model, self._alike)
        return self._sketches[rank.rank].own

    def _alike(self, kind: type[Event]) -> bool:
        """Whether ranks that did the same have equal records of a kind."""
        return kind not in OWN and str(kind.__struct_config__.tag).encode() in self._shared


def sampled(path: Path, ranks: Container[int]) -> Iterator[Event]:
    """The samples that a monitor took of these ranks, from its file."""
    for line in read_plain(path).splitlines() if ranks else ():
        if line.startswith(SAMPLES):
            number = line[len(SAMPLES) : line.find(b",", len(SAMPLES))]
            if number.isdigit() and int(number) in ranks:
                with suppress(*UNREADABLE):
                    yield decode(line)


def _shared(sketches: Sequence[Sketch]) -> set[Hashable]:
    """The kinds of records by which ranks are told apart. Most have them alike, or there are few
    values."""
    values: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    for sketch in sketches:
        for kind, value in sketch.did.items():
            values[kind][value] += 1
    return {
        kind
        for kind, found in values.items()
        if len(found) <= MOST_VALUES or 2 * max(found.values()) > len(sketches)
    }


def _remarkable(sketches: Sequence[Sketch]) -> set[int]:
    """The ranks at the ends of each thing measured."""
    found: set[int] = set()
    for measured in zip(*(s.took for s in sketches), strict=True):
        order = sorted(range(len(measured)), key=measured.__getitem__)
        found.update(sketches[i].rank for i in (*order[:2], *order[-2:]))
    return found
