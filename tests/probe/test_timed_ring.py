"""Every second of a rank belongs to one account."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events import Account
from ddpdoctor.events.timing import EVALUATING, SAVING
from ddpdoctor.probe.collectives import timed_ring
from ddpdoctor.probe.collectives.timed_ring import TimedRing
from ddpdoctor.storage import call_ring
from ddpdoctor.storage.call_ring import Phase

LINE = 7

Clock = SimpleNamespace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still; the process began at 0."""
    clock = SimpleNamespace(now=10.0)
    for module in (timed_ring, call_ring):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def ring(tmp_path: Path, clock: Clock) -> TimedRing:
    recorder: Any = SimpleNamespace(began=0.0, own_ns=0)
    return TimedRing(tmp_path / "rank-0.ring", recorder)


def after(clock: Clock, seconds: float, do: Callable[..., Any], *args: Any) -> None:
    clock.now += seconds
    do(*args)


def accounts(ring: TimedRing) -> dict[tuple[int, int], Account]:
    return {(a.phase, a.site): a for a in ring.accounts()[1]}


def total(ring: TimedRing) -> float:
    return sum(a.own_s + a.waited_s for a in ring.accounts()[1]) + ring.doctor_s


def test_phases_and_lines(ring: TimedRing, clock: Clock) -> None:
    after(clock, 1, ring.phase, Phase.DATA, LINE)
    after(clock, 2, ring.phase, Phase.USER, LINE)
    after(clock, 3, ring.enter, Phase.FORWARD, LINE, clock.now + 3)
    clock.now += 4
    found = accounts(ring)
    assert found[Phase.START, -1].own_s == 11
    assert found[Phase.DATA, LINE].own_s == 2
    assert found[Phase.USER, LINE].own_s == 3
    assert found[Phase.FORWARD, LINE].own_s == 4
    assert total(ring) == clock.now


def test_waiting_is_taken_out_of_the_phase_in_which_it_was(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.USER, LINE)
    after(clock, 5, ring.waited, 3.0)
    after(clock, 1, ring.phase, Phase.DATA, LINE)
    found = accounts(ring)[Phase.USER, LINE]
    assert (found.own_s, found.waited_s) == (3, 3)
    assert total(ring) == clock.now


def test_what_a_backward_waited_is_known_after_it(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.BACKWARD, LINE)
    after(clock, 5, ring.phase, Phase.USER, LINE)
    ring.waited_before(4.0)
    found = accounts(ring)[Phase.BACKWARD, LINE]
    assert (found.own_s, found.waited_s, found.stretches) == (1, 4, 0)
    assert total(ring) == clock.now


def test_the_doctors_own_time(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.OPTIMIZER, LINE)
    ring.recorder.own_ns = 2_000_000_000
    after(clock, 3, ring.phase, Phase.USER, LINE)
    assert accounts(ring)[Phase.OPTIMIZER, LINE].own_s == 1
    assert total(ring) == clock.now


def test_saving_is_an_account_of_its_own(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.USER, LINE)
    after(clock, 3, ring.saved, 2.0, 9)
    found = accounts(ring)
    assert (found[Phase.USER, LINE].own_s, found[SAVING, 9].own_s) == (1, 2)
    assert found[SAVING, 9].stretches == 1
    assert total(ring) == clock.now


def test_an_evaluation_lasts_until_the_rank_trains(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.DATA, LINE)
    ring.evaluating(True)
    after(clock, 1, ring.phase, Phase.USER, LINE)
    after(clock, 2, ring.phase, Phase.DATA, 9)
    ring.evaluating(False)
    after(clock, 4, ring.phase, Phase.USER, 9)
    after(clock, 8, ring.phase, Phase.BACKWARD, 9)
    found = accounts(ring)
    assert found[Phase.DATA | EVALUATING, LINE].own_s == 1
    assert found[Phase.USER | EVALUATING, LINE].own_s == 2
    assert found[Phase.DATA, 9].own_s == 4
    assert found[Phase.USER, 9].own_s == 8


def test_a_forward_without_gradients_is_an_evaluation(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.FORWARD, LINE)
    ring.evaluating(True)
    after(clock, 1, ring.phase, Phase.USER, LINE)
    after(clock, 1, ring.enter, Phase.FORWARD, 9, clock.now + 1)
    after(clock, 1, ring.phase, Phase.USER, 9)
    after(clock, 1, ring.phase, Phase.BACKWARD, 9)
    found = accounts(ring)
    assert found[Phase.FORWARD | EVALUATING, LINE].own_s == 1
    assert found[Phase.USER, 9].own_s == 1


def test_long_stretches_are_counted_with_their_steps(ring: TimedRing, clock: Clock) -> None:
    for step in range(20):
        after(clock, 0.01, ring.phase, Phase.USER, LINE)
        after(clock, 0.5 if step % 8 == 0 else 0.01, ring.phase, Phase.OPTIMIZER, LINE)
        ring.step_ended(step + 1)
    found = accounts(ring)[Phase.USER, LINE]
    assert (found.stretches, found.first, found.last) == (3, 0, 16)
    assert found.long_s == pytest.approx(1.5)


def test_long_stretches_between_two_steps_are_one(ring: TimedRing, clock: Clock) -> None:
    for step in range(3):
        for _ in range(4):
            after(clock, 0.01, ring.phase, Phase.USER, LINE)
            after(clock, 0.5, ring.phase, Phase.DATA, LINE)
        ring.step_ended(step + 1)
    found = accounts(ring)[Phase.USER, LINE]
    assert (found.stretches, found.first, found.last) == (3, 0, 2)
    assert found.long_s == pytest.approx(6.0)


def test_another_thread_is_not_timed(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.FORWARD, LINE)
    clock.now += 1
    loader = threading.Thread(target=ring.phase, args=(Phase.DATA, 9))
    loader.start()
    loader.join()
    after(clock, 1, ring.phase, Phase.USER, LINE)
    assert accounts(ring)[Phase.FORWARD, LINE].own_s == 2
    assert (Phase.DATA, 9) not in accounts(ring)


def test_a_look_at_the_accounts_changes_nothing(ring: TimedRing, clock: Clock) -> None:
    ring.phase(Phase.DATA, LINE)
    ring.evaluating(True)
    after(clock, 1, ring.accounts)
    after(clock, 1, ring.phase, Phase.USER, LINE)
    assert accounts(ring)[Phase.DATA | EVALUATING, LINE].own_s == 2


def test_phases_of_light_steps(ring: TimedRing, clock: Clock) -> None:
    after(clock, 1, ring.phase, Phase.USER, LINE)
    ring.recorder.own_ns += 10**9
    clock.now += 12
    ring.passed(
        [
            (Phase.USER, LINE, 2.0, 0.0),
            (Phase.FORWARD, LINE + 1, 3.0, 0.0),
            (Phase.USER, LINE + 1, 2.0, 0.0),
            (Phase.BACKWARD, LINE + 2, 4.0, 1.5),
        ],
        Phase.BACKWARD,
        LINE + 2,
        ring.since + 11,
    )
    found = accounts(ring)
    assert found[Phase.FORWARD, LINE + 1].own_s == 3
    backward = found[Phase.BACKWARD, LINE + 2]
    assert (backward.own_s, backward.waited_s) == (2.5, 1.5)
    assert found[Phase.USER, LINE].own_s == found[Phase.USER, LINE + 1].own_s == 1.5
    assert found[Phase.USER, LINE + 2].own_s == 1, "what follows them"
    assert total(ring) == clock.now
