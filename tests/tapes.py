"""Rings and call records for literal runs: what a probe would have left of some calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import msgspec
from recordings import PID, START, WALL, ends, ring_of, write_folder

from ddpdoctor.events import (
    CallSite,
    Event,
    GroupReady,
    Place,
    RankStood,
    Signature,
    Site,
    StackFrame,
    StallSeen,
    Statement,
)
from ddpdoctor.run import Run, load
from ddpdoctor.storage.call_ring import Phase, State

CWD = "/home/user/project"


class CallLog:
    """The calls of one rank, written as the probe writes them."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.events: list[Event] = [
            GroupReady(
                at=START, group=0, name="0", backend="gloo", ranks=tuple(range(world)),
                member=True, site=-1,
            )
        ]  # fmt: skip
        self.calls: list[tuple[int, int, int, int, int, State, float, float]] = []
        self.steps: dict[tuple[int, int], int] = {}
        self.phase: tuple[Phase, int] = (Phase.USER, -1)
        self.progress_at: float | None = None
        self._next: dict[int, int] = {}
        self._signatures: dict[object, int] = {}
        self._sites: dict[object, int] = {}
        self._clock = START + 1

    def call(
        self,
        op: str = "all_reduce",
        line: int = 10,
        text: str = "",
        *,
        inside: Sequence[tuple[int, str] | Statement] = (),
        group: int = 0,
        state: State = State.DONE,
        peer: int = -1,
        at: float | None = None,
        lasts: float = 0.01,
        step: int = 0,
        thread: str = "",
        started: bool = False,
        shadows: bool = False,
        internal: bool | None = None,
        key: str = "",
        through: str = "",
        caller: int | Sequence[int] = (),
        hands_on: int = 0,
        branches: Mapping[int, str] | None = None,
        **arguments: object,
    ) -> CallLog:
        """One call, or one in a thread that was `started` there; it ended after `lasts` unless
        `state` says that the rank is still in it. On line -1 it is nobody's: a thread of the
        backend's makes it. With a `caller` it is made in a function that this line calls (the
        nearest first), and chosen by a `key`; the innermost `hands_on` lines hand on what they were
        given, and those in `branches` are under such a statement, on the line before."""
        defaults: dict[str, object] = (
            {"numel": 4, "dtype": "float32", "device": "cpu", "reduce_op": "SUM", "shape": (4,)}
            if op == "all_reduce"
            else {}
        )
        fields = {**defaults, **arguments}
        made = (op, *sorted((k, str(v)) for k, v in fields.items()))
        if made not in self._signatures:
            self._signatures[made] = len(self._signatures)
            self.events.append(
                Signature(at=self._clock, id=self._signatures[made], op=op, **fields)  # type: ignore[arg-type]
            )
        callers = (caller,) if isinstance(caller, int) else tuple(caller)
        place = (line, text, callers, key)
        if line < 0:
            self._sites[place] = -1
        if place not in self._sites:
            number = self._sites[place] = len(self._sites)
            around = tuple(
                i if isinstance(i, Statement) else Statement(line=i[0], text=i[1]) for i in inside
            )
            self.events += [
                Site(at=self._clock, id=100 + number, file=f"{CWD}/train.py", line=line,
                     function="main", text=text or f"dist.{op}(x)  # {line}"),
                CallSite(at=self._clock, id=number, thread=thread, shadows=shadows, key=key,
                         internal=internal, through=through,
                         started=100 + number if started else -1,
                         places=() if started else (Place(100 + number, around, hands_on > 0),)),
            ]  # fmt: skip
            for depth, caller in enumerate(callers, 1):
                self._called_by(caller, hands_on > depth, (branches or {}).get(caller, ""))
        index = -1
        if peer < 0 and op != "batch_isend_irecv":
            index = self._next.get(group, 0)
            self._next[group] = index + 1
        began = self._clock if at is None else at
        ended = 0.0 if state in (State.BEGUN, State.RETURNED, State.WAITING) else began + lasts
        self.calls.append(
            (group, index, self._signatures[made], self._sites[place], peer, state, began, ended)
        )
        self.steps[group, index] = step
        self._clock = began + max(lasts, 0.01) + 0.01
        return self

    def _called_by(self, line: int, hands_on: bool, branch: str) -> None:
        around = (Statement(line=line - 1, text=branch),) if branch else ()
        last = self.events.pop()
        assert isinstance(last, CallSite)
        self.events += [
            Site(at=self._clock, id=1000 + line, file=f"{CWD}/train.py", line=line,
                 function="fit", text="call()"),
            msgspec.structs.replace(
                last, places=(*last.places, Place(1000 + line, around, hands_on))
            ),
        ]  # fmt: skip

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> CallLog:
        self.events.append(
            GroupReady(at=self._clock, group=number, name=name, backend="gloo", ranks=ranks,
                       member=self.rank in ranks, site=-1)
        )  # fmt: skip
        return self

    def now(self, phase: Phase, line: int = -1, text: str = "") -> CallLog:
        """What the rank does when it is in no call."""
        if line >= 0:
            self.events.append(
                Site(at=self._clock, id=90, file=f"{CWD}/train.py", line=line, function="main",
                     text=text)
            )  # fmt: skip
        self.phase = (phase, 90 if line >= 0 else -1)
        return self

    def write_ring(self, path: Path) -> None:
        with mock.patch("ddpdoctor.storage.call_ring.time.monotonic") as clock:
            clock.return_value = last = START
            writer = ring_of(self.rank, path)
            for group, index, signature, site, peer, state, began, ended in self.calls:
                clock.return_value = began
                if step := self.steps[group, index]:
                    writer.step = step
                number = writer.begin(group, index, signature, site, peer)
                clock.return_value = ended
                writer.mark(number, state)
                last = max(last, began, ended)
            clock.return_value = self.progress_at or last
            writer.phase(*self.phase)


def tapes(world: int = 2) -> dict[int, CallLog]:
    """One that is still empty for every rank."""
    return {rank: CallLog(rank, world) for rank in range(world)}


def run_of(
    tmp_path: Path,
    tapes: Mapping[int, CallLog],
    *,
    more: Mapping[int, Sequence[Event]] | None = None,
    now: float | None = None,
    **options: object,
) -> Run:
    """The run that these tapes are; `now` makes it one that still goes on."""
    ranks = {r: [*t.events, *(more or {}).get(r, ())] for r, t in tapes.items()}
    # The recordings' own ends of processes stand at their very beginning.
    status: Mapping[int, int | None] = options.pop("ended", {}) or {}  # type: ignore[assignment]
    if now is None and "nodes" not in options and not options.get("stopped"):
        status = {r: status.get(r, 0) for r in tapes}
    nodes: dict[int, list[Event]] = {k: list(v) for k, v in options.pop("nodes", {}).items()}  # type: ignore[attr-defined]
    nodes.setdefault(0, []).extend(msgspec.structs.replace(e, at=START + 100) for e in ends(status))
    options = {**options, "ended": None, "nodes": nodes}
    folder = write_folder(tmp_path / "run", ranks, **options)  # type: ignore[arg-type]
    for (_, path), tape in zip(folder.rank_files(), tapes.values(), strict=True):
        tape.write_ring(path)
    run = load([folder])
    run.now = now
    return run


def stall(at: float, since: float, **fields: object) -> StallSeen:
    return StallSeen(at=at, since=since, hang_after=10.0, **fields)  # type: ignore[arg-type]


def stood(rank: int, line: int, text: str, **fields: object) -> RankStood:
    frame = StackFrame(file=f"{CWD}/train.py", line=line, function="main", user=True, text=text)
    values: dict[str, object] = {"at": START + 50, "state": "S", "frames": (frame,), **fields}
    return RankStood(rank=rank, pid=PID + rank, **values)  # type: ignore[arg-type]


__all__ = ["START", "WALL", "CallLog", "run_of", "stall", "stood", "tapes"]
