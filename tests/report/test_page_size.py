"""Large runs make a page that is small and soon there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recordings import START, ring_of, started
from recordings import write_folder as written
from tapes import CallLog

from ddpdoctor.events import CallSite, Event, GroupReady, MemorySample, Pace, Signature, StepDone
from ddpdoctor.render import page
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import Run, load
from ddpdoctor.storage.call_ring import SLOTS

STEP_S = 0.05
MOST_BYTES, MOST_SECONDS = 3 << 20, 2.0
SLOW = 3
"""A machine that others use takes that many times as long, in CPU time too: its caches are cold."""


def recorded(rank: int, world: int, count: int, joined: int) -> list[Event]:
    """One rank's steps, `joined` in a record after the first 128, as the probe writes them."""
    log = CallLog(rank, world)
    log.call(at=START + 1)
    events: list[Event] = [
        started(rank, world),
        GroupReady(at=START, group=0, name="0", backend="gloo", ranks=tuple(range(world)),
                   member=True, site=-1),
        *(e for e in log.events if isinstance(e, Signature | CallSite)),
    ]  # fmt: skip
    step = 0
    while step < count:
        many = 1 if step < 128 else min(joined, count - step)
        step += many
        shares = (many * STEP_S * share for share in (0.1, 0.3, 0.4, 0.1))
        data_s, forward_s, backward_s, optimizer_s = shares
        at = START + 2 + step * STEP_S + 1e-4 * rank
        events.append(
            StepDone(at=at, optimizer=0, step=step - 1, site=-1, wall_s=many * STEP_S, count=many,
                     data_s=data_s, forward_s=forward_s, backward_s=backward_s,
                     optimizer_s=optimizer_s, backwards=many, synced=many)
        )  # fmt: skip
        if step % 8 == 0 or many > 1:
            events.append(
                Pace(at=at, optimizer=0, step=step - 1, count=min(8, step), wall_s=STEP_S,
                     waited_s=0.01 * (1 + rank % 3), own_s=(0.005,) * 8)
            )  # fmt: skip
            events.append(
                MemorySample(at=at, step=step, rss_bytes=(1 << 30) + step * 1000,
                             peak_rss_bytes=1 << 31)
            )  # fmt: skip
    return events


def large(path: Path, world: int, count: int, joined: int = 1, calls: int = SLOTS) -> Run:
    """A run whose ranks have full rings."""
    ranks = {rank: recorded(rank, world, count, joined) for rank in range(world)}
    folder = written(path / "run", ranks, ended=dict.fromkeys(ranks, 0))
    for rank, file in folder.rank_files(0):
        ring = ring_of(rank, file)
        signature = next((e.id for e in ranks[rank] if isinstance(e, Signature)), -1)
        for index in range(calls):
            at = START + 2 + (count - (calls - index) / 4) * STEP_S
            number = ring.write(0, index, signature, 0, -1, at + 0.001 * (rank % 5))
            ring.done(number, at + 0.01)
        ring.step = count
        ring.moved(START + 2 + count * STEP_S)
    return load([folder])


def measured(run: Run) -> tuple[int, float]:
    """Bytes of the page and seconds that it takes, without those of reading and judging."""
    report = diagnose(run, (), folder="runs/a")
    for rank in run.ranks.values():
        assert rank.ring is None or rank.ring.count
    began = time.process_time()
    text = page.html(report, run)
    took = time.process_time() - began
    assert "could not be drawn" not in text
    assert 'id="timeline-last"' in text
    return len(text.encode()), took


@pytest.mark.slow
def test_eight_ranks_and_ten_thousand_steps(tmp_path: Path) -> None:
    size, took = measured(large(tmp_path, 8, 10_000))
    print(f"8 ranks, 10 000 steps: {size / 1e6:.2f} MB in {took:.2f} s")
    assert size <= MOST_BYTES
    assert took <= SLOW * MOST_SECONDS


@pytest.mark.exhaustive
def test_a_thousand_ranks(tmp_path: Path) -> None:
    size, took = measured(large(tmp_path, 1024, 1000, joined=5, calls=32))
    print(f"1 024 ranks, 1 000 steps: {size / 1e6:.2f} MB in {took:.2f} s")
    assert size <= MOST_BYTES
    assert took <= 10 * MOST_SECONDS
