"""A rank's last calls and where it is now, in a small file that outlives any kill.

The rank writes through a memory map: no system call, nothing to flush, and what is written is in
the kernel's page cache whatever ends the process. Fixed slots, overwritten oldest first; a slot is
written *before* its call, since gloo aborts from C++ on some faults.
"""

from __future__ import annotations

import enum
import os
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from .safe_fd import mapped

MAGIC = b"DDPDRING"
VERSION = 2
SLOTS = 1024

_HEAD = struct.Struct("<8sIIIIQ")  # magic, version, slots, pid, unused, nonce
_PHASE = struct.Struct("<iid")  # phase, site, since
PHASE_AT = 64
_MOVED = struct.Struct("<qQd")  # step, calls made, at
_MOVED_AT = PHASE_AT + _PHASE.size
WHERE = struct.Struct("<iidqQd")  # both at once: they lie side by side
_HEAD_BYTES = 256
# number + 1, index, group, signature, site, step, peer, began, state, ended
_SLOT = struct.Struct("<Qqiiiqidi4xd")
_SLOT_BYTES = _SLOT.size
_END = struct.Struct("<i4xd")  # the tail of a slot: state, ended
_END_AT = _SLOT.size - _END.size
_SLACK_S = 1e-3  # times that went through the wall clock are that exact


class Phase(enum.IntEnum):
    """What a rank was doing when it was not in a collective."""

    START = 0
    USER = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    INIT = 6
    LEAVING = 7


class State(enum.IntEnum):
    """How far a call got.

    `RETURNED`: an asynchronous call was issued; `WAITING`: its `wait()` was entered. `VOID`: what
    looked like communication was none, and its number in the group was given to the next call.
    """

    BEGUN = 1
    RETURNED = 2
    WAITING = 3
    DONE = 4
    FAILED = 5
    VOID = 6


_DONE = int(State.DONE)


@dataclass(frozen=True)
class Call:
    """One collective or point-to-point call, as a slot of the ring holds it.

    Attributes:
        number: of the call on this rank, from 0.
        group: number of the process group on this rank; index: of the call in that group.
        signature, site: numbers of `Signature` and `CallSite` records.
        began, ended: seconds on the node's monotonic clock; ended 0 where it has not.
        peer: global rank of the other side, -1 for collectives.
    """

    number: int
    index: int
    group: int
    signature: int
    site: int
    step: int
    peer: int
    state: State
    began: float
    ended: float

    @property
    def inside(self) -> bool:
        """The rank was in this call when it was last heard of."""
        return self.state in (State.BEGUN, State.WAITING)

    def open_at(self, at: float) -> bool:
        """Whether the rank was inside this call at a moment, or failed in it just then."""
        if self.state is State.FAILED:
            return self.began <= at + _SLACK_S and self.ended >= at - _SLACK_S
        blocking = self.state in (State.BEGUN, State.WAITING, State.DONE)
        return blocking and self.began <= at and (self.ended == 0.0 or self.ended >= at)


class Ring:
    """What a ring file says.

    Attributes:
        phase, phase_site, phase_since: what the rank does when it is in no call.
        progress_at: when the rank was last seen to do anything.
        count: calls made so far.
        nonce: names the socket on which the rank can be asked (see `ask_address`), 0 for none.
    """

    def __init__(
        self, data: bytes, numbers: Mapping[int, int] | None = None, shift: float = 0.0
    ) -> None:
        """Raises ValueError where these bytes are no ring of this version.

        Args:
            numbers: the run's numbers of the ranks in it, None where they are those.
            shift: seconds to add to its times.
        """
        self._numbers, self._shift = numbers, shift
        if len(data) < _HEAD_BYTES + SLOTS * _SLOT_BYTES:
            raise ValueError("too short")
        magic, version, slots, self.pid, _, self.nonce = _HEAD.unpack_from(data, 0)
        if (magic, version, slots) != (MAGIC, VERSION, SLOTS):
            raise ValueError("another version")
        self._data = data
        phase, self.phase_site, self.phase_since = _PHASE.unpack_from(data, PHASE_AT)
        self.step, self.count, moved_at = _MOVED.unpack_from(data, _MOVED_AT)
        self.phase_since += shift
        self.progress_at = max(self.phase_since, moved_at + shift)
        self.phase = Phase(phase) if phase in Phase._value2member_map_ else Phase.USER

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The last calls, oldest first."""
        return self._read(range(SLOTS))

    @cached_property
    def last_calls(self) -> tuple[Call, ...]:
        """The very last ones; cheaper than `calls`."""
        newest = self.count % SLOTS
        return self._read([(newest - back) % SLOTS for back in range(1, 9)])

    def _read(self, slots: Iterable[int]) -> tuple[Call, ...]:
        found = []
        for place in slots:
            slot = _SLOT.unpack_from(self._data, _HEAD_BYTES + place * _SLOT_BYTES)
            number, index, group, signature, site, step, peer, began, state, ended = slot
            if self._numbers is not None:
                peer = self._numbers.get(peer, -1)
            if number and 1 <= state <= len(State):
                found.append(
                    Call(
                        number - 1,
                        index,
                        group,
                        signature,
                        site,
                        step,
                        peer,
                        State(state),
                        began + self._shift,
                        ended + self._shift if ended else 0.0,
                    )
                )
        return tuple(sorted(found, key=lambda c: c.number))


class RingWriter:
    """The rank's side."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be made."""
        self._map = mapped(path, _HEAD_BYTES + SLOTS * _SLOT_BYTES, os.O_EXCL)
        self.count = 0
        self.mark_phase = partial(WHERE.pack_into, self._map, PHASE_AT)
        self._pid = os.getpid()
        self.step = 0
        self.answers(0)
        self.phase(Phase.START, -1)

    def answers(self, nonce: int) -> None:
        """Say under which name this process can be asked; 0 for not at all."""
        _HEAD.pack_into(self._map, 0, MAGIC, VERSION, SLOTS, self._pid, 0, nonce)

    @property
    def progress_at(self) -> float:
        """As `Ring.progress_at`."""
        _, _, since = _PHASE.unpack_from(self._map, PHASE_AT)
        return float(max(since, _MOVED.unpack_from(self._map, _MOVED_AT)[2]))

    @property
    def phase_now(self) -> int:
        """The `Phase` that the rank is in."""
        return int(_PHASE.unpack_from(self._map, PHASE_AT)[0])

    @property
    def newest(self) -> int:
        """The number of the last call, -1 before the first."""
        return self.count - 1

    def call(self, number: int) -> tuple[int, int] | None:
        """Group and index of a call, while it is still in the ring."""
        if number <= self.count - SLOTS:
            return None
        where = _HEAD_BYTES + (number % SLOTS) * _SLOT_BYTES
        _, index, group, *_ = _SLOT.unpack_from(self._map, where)
        return group, index

    def state(self, number: int) -> State | None:
        """How far a call got, while it is still in the ring."""
        if number <= self.count - SLOTS:
            return None
        where = _HEAD_BYTES + (number % SLOTS) * _SLOT_BYTES + _END_AT
        return State(_END.unpack_from(self._map, where)[0])

    def phase(self, phase: int, site: int) -> float:
        """The rank goes over to another phase; returns the time."""
        now = time.monotonic()
        _PHASE.pack_into(self._map, PHASE_AT, phase, site, now)
        return now

    def enter(self, phase: int, site: int, now: float) -> None:
        """The rank enters another phase, at a time that the caller knows."""
        WHERE.pack_into(self._map, PHASE_AT, phase, site, now, self.step, self.count, now)

    def moved(self, now: float) -> None:
        """The rank is known to have done something."""
        _MOVED.pack_into(self._map, _MOVED_AT, self.step, self.count, now)

    def begin(self, group: int, index: int, signature: int, site: int, peer: int) -> int:
        """Write a call down before it is made; returns its number."""
        now = time.monotonic()
        number = self.write(group, index, signature, site, peer, now)
        self.moved(now)
        return number

    def write(
        self, group: int, index: int, signature: int, site: int, peer: int, now: float
    ) -> int:
        """Write a call down whose time of progress the caller notes itself (`moved`, `enter`)."""
        number, self.count = self.count, self.count + 1
        _SLOT.pack_into(
            self._map,
            _HEAD_BYTES + (number % SLOTS) * _SLOT_BYTES,
            number + 1,
            index,
            group,
            signature,
            site,
            self.step,
            peer,
            now,
            1,
            0.0,
        )
        return number

    def mark(self, number: int, state: int) -> None:
        """The call moved on; nothing where its slot belongs to a later one by now."""
        if number <= self.count - SLOTS:
            return
        now = time.monotonic()
        ended = now if state >= 4 else 0.0
        where = _HEAD_BYTES + (number % SLOTS) * _SLOT_BYTES + _END_AT
        _END.pack_into(self._map, where, state, ended)
        self.moved(now)

    def done(self, number: int, now: float) -> None:
        """The call is over; `enter` follows."""
        if number > self.count - SLOTS:
            where = _HEAD_BYTES + (number % SLOTS) * _SLOT_BYTES + _END_AT
            _END.pack_into(self._map, where, _DONE, now)


ASK_STACKS, ASK_LINES = b"stacks", b"lines"
"""What the monitor asks a rank for: see `probe.collectives.stack_server`."""


def ask_address(pid: int, nonce: int) -> str:
    """Where a rank of this node waits for questions: an abstract socket, so no file."""
    return f"\0ddpdoctor-{pid}-{nonce:x}"


def read_ring(
    path: Path, numbers: Mapping[int, int] | None = None, shift: float = 0.0
) -> Ring | None:
    """What the ring file of a rank says, or None where there is none that can be read. `numbers`,
    `shift`: as of `Ring`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return Ring(file.read(_HEAD_BYTES + SLOTS * _SLOT_BYTES), numbers, shift)
    except (OSError, ValueError):
        return None
