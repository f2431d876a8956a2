"""Where each rank stands, by its stacks: in which call, at which line, waiting for which thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..events import STOPPED_STATES
from ..events.operations import OPERATIONS
from ..run import Location
from .locks import same, waited_for
from .own import is_own, short
from .records import Frame, Look, RankLook, Thread

MESSAGES = frozenset({
    "batch_isend_irecv", *(name for name, op in OPERATIONS.items() if op.sends or op.receives),
})  # fmt: skip
"""Functions in which a rank waits for one other rank."""

COLLECTIVES = MESSAGES | OPERATIONS.keys() | {"destroy_process_group"}
"""Functions of `torch.distributed` in which a rank waits for others."""

BUSY = 0.3
"""Cores; a rank that uses more computes, or spins while it waits for a device."""

WAKES = 10.0
"""A second. The main thread of a rank that waits for others sleeps all the time; one that goes
through many calls, and was seen in the same one twice, wakes in each of them. In
`init_process_group` it polls."""

READS = (".item()", ".cpu()", ".tolist()", ".synchronize()", ".numpy()", ".wait()")
"""In the text of a line: it waits for a device, or for an asynchronous collective."""

_JOBS = ("collective", "backward", "init", "loader", "device")
"""What tells the thread that trains from others, the surest first."""

_HANDOVERS = ("/threading.py", "/queue.py", "/concurrent/futures/", "/asyncio/", "/selectors.py")
"""Files of Python; a thread whose innermost frame is there waits for another thread."""


@dataclass(frozen=True)
class Awaited:
    """A thread that the main thread waits for.

    Attributes:
        holds: it holds the lock that the main thread waits for.
        wants: the lock that it waits for itself, where the main thread holds that one.
    """

    thread: Thread
    place: Location
    moved: bool
    holds: bool
    wants: str

    @property
    def goes_on(self) -> bool:
        return self.moved or self.thread.wanted >= BUSY or self.thread.wakes > WAKES

    @property
    def name(self) -> str:
        return f"thread `{self.thread.name}`" if self.thread.name else "a thread without a name"


@dataclass(frozen=True)
class Stand:
    """Where a rank stands.

    Attributes:
        kind: `collective`, `backward`, `init`, `loader`, `device` (reads a result), `user`, `gone`
            (no stack).
        op: what it is in, in words, such as the collective; empty where it is in none.
        place: the innermost line of the program.
        moved: it was not there in each look.
        wakes, wanted: of the thread that was judged.
        thread: that one, where it is not the main thread.
        awaits: threads that the main thread waits for; `lock`: what it waits to take.
    """

    rank: RankLook
    kind: str
    op: str = ""
    place: Location | None = None
    moved: bool = False
    wakes: float = 0.0
    wanted: float = 0.0
    thread: Thread | None = None
    awaits: tuple[Awaited, ...] = ()
    lock: str = ""

    @property
    def stopped(self) -> bool:
        return self.rank.state in STOPPED_STATES

    @property
    def goes_on(self) -> bool:
        """Whether it computes, or has been elsewhere in one of the looks."""
        if self.stopped:
            return False
        busy = max(self.rank.cpu, self.wanted) >= BUSY  # or others have taken the cores
        return self.moved or busy or self.wakes > WAKES

    @property
    def waits(self) -> bool:
        """Whether it stood there, in something that needs other ranks."""
        if self.stopped or self.moved:
            return False
        if self.kind == "init":
            return True
        idle = self.kind != "backward" or self.rank.cpu < BUSY
        return self.kind in ("collective", "backward", "device") and self.wakes <= WAKES and idle

    @property
    def where(self) -> str:
        """`all_reduce (train.py:12)`, `train.py:30`."""
        if self.kind == "gone":
            return self.rank.trouble or "no stack could be read"
        place = str(self.place) if self.place else ""
        if self.op:
            return f"{self.op} ({place})" if place else self.op
        return place or "no line of the program"

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Those whose stacks tell more than the main thread's."""
        judged = (self.thread,) if self.thread else ()
        return (*judged, *(a.thread for a in self.awaits))

    @property
    def state(self) -> str:
        """The state of its process as far as it matters: empty for any that runs or sleeps."""
        return self.rank.state if self.rank.state in (*STOPPED_STATES, "Z", "D", "") else "S"


def stand_of(rank: RankLook) -> Stand:
    """Where a rank stands, by its last stack. Where the main thread waits for another thread, the
    one that trains is judged in its place."""
    if not rank.looks:
        return Stand(rank, "gone")
    main = replace(_stand(rank, rank.looks), wakes=rank.wakes, wanted=rank.wanted)
    frames = rank.looks[-1].frames
    lock = _lock(frames)
    if main.kind != "user" or not (lock or _hands_over(frames)):
        return main
    others = [
        replace(_stand(rank, t.looks), wakes=t.wakes, wanted=t.wanted, thread=t)
        for t in rank.threads
    ]
    training = [s for kind in _JOBS for s in others if s.kind == kind]
    if training and not lock:
        return training[0]
    awaited = [_awaited(s, rank, lock) for s in others if s.place]
    holders = [a for a in awaited if a.holds]
    if len(awaited) == 1 and not lock:  # it does the work of the process
        one = awaited[0]
        main = replace(main, moved=one.moved, wakes=one.thread.wakes, wanted=one.thread.wanted)
    return replace(main, awaits=tuple(holders or awaited), lock=lock)


def _awaited(stand: Stand, rank: RankLook, lock: str) -> Awaited:
    assert stand.thread is not None and stand.place is not None
    wants = _lock(stand.thread.looks[-1].frames)
    return Awaited(
        stand.thread,
        stand.place,
        stand.moved,
        holds=bool(lock) and any(same(lock, one) for one in stand.thread.holds),
        wants=wants if wants and any(same(wants, one) for one in rank.holds) else "",
    )


def _stand(rank: RankLook, looks: Sequence[Look]) -> Stand:
    """Where a thread of a rank stands."""
    frames = looks[-1].frames
    number = next((n for n, f in enumerate(frames) if not is_own(f.file)), None)
    own = frames[number] if number is not None else None
    kind, op = _doing(frames[:number], own)
    place = Location(short(own.file), own.line, own.function, own.source) if own else None
    lines = _own_lines if kind == "init" else _lines  # which polls
    moved = any(lines(look.frames) != lines(frames) for look in looks)
    return Stand(rank, kind, op, place, moved)


def _lines(frames: Iterable[Frame]) -> list[tuple[str, int]]:
    return [(f.file, f.line) for f in frames]


def _own_lines(frames: Iterable[Frame]) -> list[tuple[str, int]]:
    return [(f.file, f.line) for f in frames if not is_own(f.file)]


def _hands_over(frames: Sequence[Frame]) -> bool:
    """Whether a thread waits for another one."""
    inner = frames[0].file if frames else ""
    return is_own(inner) and any(part in inner for part in _HANDOVERS)


def _lock(frames: Sequence[Frame]) -> str:
    """The lock that a thread waits for: it stands in the statement that takes it."""
    for frame in frames:
        if not is_own(frame.file):
            return waited_for(frame.source)
        if not frame.file.endswith("/threading.py") or frame.function == "wait":
            return ""
    return ""


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
    reads = own is not None and any(text in own.source for text in READS)
    if own is not None and reads and (not above or in_torch):
        return "device", own.source
    return "user", ""


def classes(stands: Iterable[Stand]) -> list[list[Stand]]:
    """The ranks by their stacks and states; the largest class first."""
    found: dict[object, list[Stand]] = {}
    for stand in stands:
        looks = [stand.rank.looks, *(t.looks for t in stand.threads)]
        stacks = tuple(tuple(look[-1].frames) if look else () for look in looks)
        found.setdefault((stacks, stand.kind, stand.state), []).append(stand)
    return sorted(found.values(), key=lambda same: (-len(same), same[0].rank.rank))
