"""The ring of a rank's last calls."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ddpdoctor.storage.call_ring import SLOTS, Phase, RingWriter, State, read_ring


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ring"
    writer = RingWriter(path)
    writer.step = 7
    first = writer.begin(0, 0, 3, 4, -1)
    second = writer.begin(2, 9, 5, 6, 1)
    writer.mark(first, State.DONE)
    writer.phase(Phase.DATA, 12)
    ring = read_ring(path)
    assert ring is not None
    done, begun = ring.calls
    assert (done.group, done.index, done.signature, done.site, done.step) == (0, 0, 3, 4, 7)
    assert (done.state, begun.state, begun.peer) == (State.DONE, State.BEGUN, 1)
    assert done.ended >= done.began
    assert begun.inside
    assert (ring.phase, ring.phase_site, ring.count) == (Phase.DATA, 12, 2)
    assert second == begun.number == 1


def test_the_oldest_are_overwritten(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "r.ring")
    first = writer.begin(0, 0, 0, 0, -1)
    for index in range(1, SLOTS + 5):
        writer.begin(0, index, 0, 0, -1)
    writer.mark(first, State.DONE)  # its slot is another's by now
    ring = read_ring(tmp_path / "r.ring")
    assert ring is not None
    assert [c.index for c in ring.calls] == list(range(5, SLOTS + 5))
    assert all(c.state is State.BEGUN for c in ring.calls)
    assert [c.index for c in ring.last_calls] == list(range(SLOTS - 3, SLOTS + 5))


def test_every_movement_is_progress(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "r.ring")
    seen = []
    for move in (
        lambda: writer.begin(0, 0, 0, 0, -1),
        lambda: writer.mark(0, State.DONE),
        lambda: writer.phase(Phase.FORWARD, 1),
        lambda: writer.moved(time.monotonic()),
        lambda: writer.enter(Phase.BACKWARD, 1, time.monotonic()),
    ):
        move()
        ring = read_ring(tmp_path / "r.ring")
        assert ring is not None
        seen.append(ring.progress_at)
    assert seen == sorted(set(seen))


def test_a_phase_that_is_entered_again_is_written_as_any_other(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "r")
    at = writer.phase(Phase.USER, 3) + 1.0
    writer.step = 5
    number = writer.write(0, 0, 0, 0, -1, at)
    writer.enter(Phase.BACKWARD, 7, at)
    ring = read_ring(tmp_path / "r")
    assert ring is not None
    assert (ring.phase, ring.phase_site, ring.step, ring.count) == (Phase.BACKWARD, 7, 5, 1)
    assert ring.progress_at == ring.phase_since == ring.calls[0].began == at
    writer.done(number, at + 1)
    again = read_ring(tmp_path / "r")
    assert again is not None
    assert (again.calls[0].state, again.calls[0].ended) == (State.DONE, at + 1)


def test_it_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "r.ring"
    pid = os.fork()
    if not pid:
        RingWriter(path).begin(0, 41, 0, 0, -1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    ring = read_ring(path)
    assert ring is not None
    assert [c.index for c in ring.calls] == [41]


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"\0" * 100_000, b"DDPDRING" + b"\xff" * 90_000]
)
def test_foreign_bytes_are_no_ring(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.ring"
    path.write_bytes(content)
    assert read_ring(path) is None
    assert read_ring(tmp_path / "none.ring") is None


def test_a_call_costs_microseconds(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "r.ring")
    best = min(_per_call(writer) for _ in range(5))
    assert best < 50e-6


def _per_call(writer: RingWriter, count: int = 2000) -> float:
    began = time.process_time()
    for index in range(count):
        writer.mark(writer.begin(0, index, 0, 0, -1), State.DONE)
    return (time.process_time() - began) / count
