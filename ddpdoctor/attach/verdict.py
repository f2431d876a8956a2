"""Says from the stacks of all ranks who waits where, and who is not there."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..report.findings import Confidence, Finding, FixKind, Related, Severity
from ..run import Location, counted, fold_ranks, ranks_do, ranks_text, ranks_were
from .records import Frame, JobLook, RankLook

COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "all_reduce_coalesced",
    "recv_object_list", "send_object_list", "destroy_process_group", "new_group",
})  # fmt: skip
"""Functions of `torch.distributed` in which a rank waits for others."""

BUSY = 0.3
"""Cores; a rank that uses more computes, or spins while it waits for a device."""

WAKES = 10.0
"""A second. The main thread of a rank that waits for others sleeps all the time; one that goes
through many calls, and was seen in the same one twice, wakes in each of them."""

READS = (".item()", ".cpu()", ".tolist()", ".synchronize()", ".numpy()", ".wait()")
"""In the text of a line: it waits for a device, or for an asynchronous collective."""

_STANDARD = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} - {None, ""})
)
_FOREIGN = ("site-packages", "dist-packages", "/ddpdoctor/probe/", "(importlib._bootstrap)")


@dataclass(frozen=True)
class Stand:
    """Where a rank stands.

    Attributes:
        kind: `collective`, `init`, `loader`, `device` (reads a result), `user`, `gone` (no stack).
        op: the collective, or `backward`, in words; empty where it is in none.
        place: the innermost line of the program.
        moved: it was elsewhere the first time.
    """

    rank: RankLook
    kind: str
    op: str
    place: Location | None
    moved: bool

    @property
    def goes_on(self) -> bool:
        """Whether it computes, or has been elsewhere between the two looks."""
        busy = max(self.rank.cpu, self.rank.wanted) >= BUSY  # or others have taken the cores
        return self.moved or busy or self.rank.wakes > WAKES

    @property
    def waits(self) -> bool:
        """Whether it stood there, in something that needs other ranks."""
        stands = not self.moved and self.rank.wakes <= WAKES
        idle = self.kind != "backward" or self.rank.cpu < BUSY
        return self.kind in ("collective", "init", "backward", "device") and stands and idle

    @property
    def where(self) -> str:
        """`all_reduce (train.py:12)`, `train.py:30`."""
        if self.kind == "gone":
            return self.rank.trouble or "no stack could be read"
        return f"{self.op} ({self.place})" if self.op and self.place else self.op or str(self.place)

    @cached_property
    def stack(self) -> tuple[tuple[str, str, int], ...]:
        looks = self.rank.looks
        return tuple((f.function, f.file, f.line) for f in looks[-1].frames) if looks else ()


def is_own(file: str) -> bool:
    """Whether a file belongs to Python, torch or a package, and not to the program."""
    if not file or file.startswith("<") or any(part in file for part in _FOREIGN):
        return True
    return file.startswith(_STANDARD) or "/lib/python3." in file


def stand_of(rank: RankLook) -> Stand:
    """Where a rank stands, by its last stack."""
    if not rank.looks:
        return Stand(rank, "gone", "", None, moved=False)
    frames = rank.looks[-1].frames
    number = next((n for n, f in enumerate(frames) if not is_own(f.file)), None)
    own = frames[number] if number is not None else None
    above = frames[:number]
    place = Location(short(own.file), own.line, own.function, own.source) if own else None
    first = rank.looks[0].frames
    moved = len(rank.looks) > 1 and _lines(first) != _lines(frames)
    kind, op = _doing(above, own)
    return Stand(rank, kind, op, place, moved)


def _lines(frames: Iterable[Frame]) -> list[tuple[str, int]]:
    return [(f.file, f.line) for f in frames]


def short(file: str) -> str:
    """The path as it would be typed here."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def _doing(above: Sequence[Frame], own: Frame | None) -> tuple[str, str]:
    """What the frames above the program's line do: a kind, and the operation."""
    in_torch = [f for f in above if "torch" in f.file]
    for frame in reversed(in_torch):  # the outermost is what the program called
        name, file = frame.function, frame.file
        if name in ("init_process_group", "_create_c10d_store", "rendezvous"):
            return "init", "init_process_group"
        if "distributed" in file and name in COLLECTIVES:
            return "collective", name
        if file.endswith("nn/parallel/distributed.py"):
            ways = {"__init__": "DDP()", "forward": "DDP forward", "_pre_forward": "DDP forward"}
            if name in ways and any("distributed" in f.file and f is not frame for f in in_torch):
                return "collective", ways[name]
            if name == "__init__":
                return "collective", "DDP()"
            if name in ("_sync_buffers", "_sync_module_states"):
                return "collective", "DDP forward"
        if name in ("backward", "_engine_run_backward"):
            return "backward", "backward"
        if file.endswith("utils/data/dataloader.py"):
            return "loader", "the next batch"
    if own is not None and any(text in own.source for text in READS):
        return "device", own.source
    return "user", ""


def classes(stands: Iterable[Stand]) -> list[list[Stand]]:
    """The ranks by their stack; the largest class first."""
    found: dict[object, list[Stand]] = {}
    for stand in stands:
        found.setdefault((stand.stack, stand.kind), []).append(stand)
    return sorted(found.values(), key=lambda same: (-len(same), same[0].rank.rank))


def judge(job: JobLook) -> list[Finding]:
    """What is wrong with a job, as far as two looks at its stacks tell: all of it suspected."""
    stands = [stand_of(rank) for rank in job.ranks]
    waiting = [s for s in stands if s.waits]
    apart = [s for s in stands if not s.waits]
    seen = {rank.rank for rank in job.ranks}
    missing = [n for n in range(job.launched) if job.launched > len(job.ranks) and n not in seen]
    if not waiting:
        stuck = [s for s in stands if s.kind == "loader" and not s.goes_on]
        return [_loader(stuck, [])] if stuck and len(stuck) == len(stands) else []
    if missing and len(job.ranks) + len(missing) <= max(job.world_size, job.launched):
        return [_gone(job, waiting, missing)]
    here = {(s.op, str(s.place)) for s in waiting}
    if any(s.goes_on and (s.op, str(s.place)) in here for s in apart):
        return []  # it is in that call and goes on, so the others have not waited for long
    if apart:
        loading = [s for s in apart if s.kind == "loader" and not s.moved]
        return (
            [_loader(loading, waiting)] if len(loading) == len(apart) else [_absent(apart, waiting)]
        )
    places = {(s.op, str(s.place)) for s in waiting}
    if len({op for op, _ in places}) > 1 or len(places) > 1:
        return [_different(waiting)]
    return [_all_wait(job, waiting)]


def _found(code: str, check: str, rule: str, **fields: object) -> Finding:
    given = {"severity": Severity.ERROR, "confidence": Confidence.SUSPECTED,
             "fix_kind": FixKind.CHECK, **fields}  # fmt: skip
    return Finding(code=code, check=check, rule=rule, **given)  # type: ignore[arg-type]


def _by_place(stands: Sequence[Stand]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for stand in stands:
        found.setdefault(stand.where, []).append(stand.rank.rank)
    return list(found.items())


def _evidence(stands: Sequence[Stand]) -> list[dict[str, object]]:
    return [{"ranks": fold_ranks(ranks), "where": where} for where, ranks in _by_place(stands)]


def _related(stands: Sequence[Stand], than: Location | None) -> tuple[Related, ...]:
    found: dict[str, tuple[Location, list[int]]] = {}
    for stand in stands:
        if stand.place and str(stand.place) != str(than):
            found.setdefault(str(stand.place), (stand.place, []))[1].append(stand.rank.rank)
    return tuple(
        Related(f"{ranks_do(ranks, 'wait')} here", place) for place, ranks in found.values()
    )[:3]


def _most(stands: Sequence[Stand]) -> Stand:
    places = [s.where for s in stands]
    return max(stands, key=lambda s: places.count(s.where))


def _absent(apart: Sequence[Stand], waiting: Sequence[Stand]) -> Finding:
    """Ranks that are somewhere else while others wait."""
    ranks = tuple(s.rank.rank for s in apart)
    stopped = [s for s in apart if s.rank.state in ("T", "t")]
    first, there = (stopped or list(apart))[0], _most(waiting)
    if stopped:
        rule, cause = "stopped", "a signal has stopped its process"
        fix = f"let it go on: `kill -CONT {first.rank.pid}`"
    elif first.kind == "gone":
        rule, cause = "not-readable", f"its stack could not be read: {first.rank.trouble}"
        fix = "look at its log: it may have ended, or failed in code that is not Python's"
    elif first.goes_on:
        rule, cause = "busy", f"it goes on: it uses {first.rank.cpu:.1f} cores"
        if first.moved:
            cause += ", and has moved between the two looks"
        elif first.rank.wakes > WAKES:
            cause += f", and slept and went on {first.rank.wakes:.0f} times a second"
        fix = "see what this line does on that rank; look again later, with `ddpdoctor attach`"
    else:
        rule, cause = "idle", "it waits there, uses no CPU time, and did not move between two looks"
        fix = "see what this line waits for on that rank"
    return _found(
        "DDP603", "rank-missing", rule,
        ranks=ranks,
        subjects=(there.op,) if there.op else (),
        location=first.place,
        label=f"{ranks_were(ranks).replace('were', 'are').replace('was', 'is')} here",
        related=_related(waiting, first.place),
        summary=f"{ranks_do((s.rank.rank for s in waiting), 'wait')} in {there.where}; "
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} not there, but at "
        + "; ".join(dict.fromkeys(s.where for s in apart)),
        cause=cause,
        fix=fix,
        evidence={"waiting": _evidence(waiting), "elsewhere": _evidence(apart),
                  "cores used": [{"rank": s.rank.rank, "cores": s.rank.cpu} for s in apart]},
    )  # fmt: skip


def _loader(loading: Sequence[Stand], waiting: Sequence[Stand]) -> Finding:
    """Ranks that wait for a batch."""
    first = loading[0]
    ranks = tuple(s.rank.rank for s in loading)
    workers = [w for s in loading for w in s.rank.workers]
    places = {f"{f.file}:{f.line}": f for w in workers for f in w.frames if not is_own(f.file)}
    innermost = next(iter(places.values()), None)
    dead = [w.pid for w in workers if w.state in ("Z", "", "T")]
    why = (
        f"workers {', '.join(map(str, dead))} have ended or are stopped"
        if dead
        else f"a worker stands at {short(innermost.file)}:{innermost.line} `{innermost.source}`"
        if innermost
        else "what its workers do is not known"
        if workers
        else "it loads in its own process"
    )
    return _found(
        "DDP608", "data-stall", "data-stall",
        ranks=ranks,
        location=first.place,
        label="waits for a batch",
        related=_related(waiting, first.place),
        summary=f"{ranks_do(ranks, 'wait')} for a batch of its loader"
        + (f", and {ranks_do((s.rank.rank for s in waiting), 'wait')} in {_most(waiting).where}"
           if waiting else ""),
        cause=why,
        fix="see what the dataset does there: a file system that does not answer, a lock, a queue",
        evidence={"workers": [
            {"pid": w.pid, "state": w.state, "cores": w.cpu} for w in workers[:8]
        ], "waiting": _evidence(waiting)},
    )  # fmt: skip


def _gone(job: JobLook, waiting: Sequence[Stand], missing: Sequence[int]) -> Finding:
    """Ranks that have no process here any more."""
    there = _most(waiting)
    return _found(
        "DDP604", "rank-exited-early", "no-process",
        ranks=tuple(missing),
        location=there.place,
        label=f"{ranks_do((s.rank.rank for s in waiting), 'wait')} here",
        summary=f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} no process any "
        f"more, and {ranks_do((s.rank.rank for s in waiting), 'wait')} in {there.where}",
        cause=f"{counted(job.launched, 'rank was', 'ranks were')} launched on {job.node}, "
        f"{len(job.ranks)} {'is' if len(job.ranks) == 1 else 'are'} there: the others have ended, "
        "and cannot answer",
        fix="look at the log and the exit status of these ranks",
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip


def _different(waiting: Sequence[Stand]) -> Finding:
    """All wait, but not in the same call."""
    by_place = sorted(_by_place(waiting), key=lambda item: len(item[1]))
    few = next(s for s in waiting if s.where == by_place[0][0])
    ranks = tuple(by_place[0][1])
    return _found(
        "DDP601", "collective-mismatch", "different-calls",
        ranks=ranks,
        subjects=tuple(dict.fromkeys(s.op for s in waiting if s.op)),
        location=few.place,
        label=f"{ranks_do(ranks, 'wait')} here",
        related=_related(waiting, few.place),
        summary="ranks wait in different calls: " + "; ".join(
            f"{ranks_text(ranks)} in {where}" for where, ranks in by_place
        ),
        cause="each waits for the others in a call that they are not in",
        fix="make all ranks issue the same collectives in the same order; run it again under "
        "`ddpdoctor run`, which records the calls and says where they parted",
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip


def _all_wait(job: JobLook, waiting: Sequence[Stand]) -> Finding:
    """All that are known wait in the same call."""
    there = _most(waiting)
    elsewhere = job.world_size - len(job.ranks)
    ranks = tuple(s.rank.rank for s in waiting)
    return _found(
        "DDP609", "stall", "others-missing" if elsewhere > 0 else "all-in-one-call",
        severity=Severity.WARNING,
        ranks=ranks,
        subjects=(there.op,) if there.op else (),
        location=there.place,
        label=f"{ranks_do(ranks, 'wait')} here",
        summary=f"{ranks_do(ranks, 'wait')} in {there.where}, and none has moved",
        cause=f"{counted(elsewhere, 'rank is', 'ranks are')} elsewhere: who is missing is there"
        if elsewhere > 0
        else "all ranks are in the same call: its number, its sizes or the network may differ, "
        "which stacks do not show",
        fix="run `ddpdoctor attach --json FILE` on every node, then `ddpdoctor report FILE...`"
        if elsewhere > 0
        else "run it again under `ddpdoctor run`, which compares the calls of all ranks",
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip
