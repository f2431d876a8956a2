"""What a run says of itself, from literal records."""

from __future__ import annotations

import pytest
from msgspec import structs
from recordings import make_run

from ddpdoctor.events import StepDone
from ddpdoctor.run import equal_ranks, odd_ones
from ddpdoctor.run.steps import reported_steps


def test_steps_that_were_joined_count_each() -> None:
    joined = StepDone(at=0, optimizer=0, step=59, site=-1, wall_s=1.0, count=50)
    run = make_run({0: [joined] * 5})
    assert run.ranks[0].step_time() == pytest.approx(0.02)


def test_a_step_of_two_optimizers_in_turn() -> None:
    """As of a model and a head: each is half of an iteration later than the other."""
    done = [
        StepDone(at=0, optimizer=n % 2, step=n // 2, site=-1, wall_s=(0.03, 0.01)[n % 2])
        for n in range(12)
    ]
    assert make_run({0: done}).ranks[0].step_time() == pytest.approx(0.04)


def took(optimizer: int, count: int, since: float, backward_s: float = 0.5) -> list[StepDone]:
    """So many steps of a second each."""
    return [
        StepDone(
            at=1000 + since + n,
            optimizer=optimizer,
            step=n,
            site=-1,
            wall_s=1.0,
            backward_s=backward_s,
        )
        for n in range(count)
    ]


def test_a_run_is_as_long_as_its_optimizers_in_turn() -> None:
    together = [*took(0, 30, since=0.0), *took(1, 10, since=5.5)]
    later = [*took(2, 20, since=100.0), *took(3, 5, since=200.0)]
    rank = make_run({0: sorted(together + later, key=lambda e: e.at)}).ranks[0]
    assert [rank.steps_of(n) for n in range(4)] == [30, 10, 20, 5]
    assert rank.steps == 30
    assert reported_steps(rank) == 30 + 20 + 5


def test_optimizers_that_step_together_once_are_not_in_turn() -> None:
    first, *others = (took(n, 1, since=n / 100, backward_s=0.5 * (n == 0)) for n in range(6))
    rank = make_run({0: [*first, *(e for events in others for e in events)]}).ranks[0]
    assert reported_steps(rank) == 1


def test_the_ranks_that_are_not_as_most_others() -> None:
    groups = equal_ranks({0: "a", 1: "b", 2: "a", 3: "a"})
    assert groups == [(0, 2, 3), (1,)]
    assert odd_ones(groups) == (1,)
    assert odd_ones(equal_ranks({0: "a", 1: "b"})) == (0, 1), "no majority"
    assert odd_ones(equal_ranks({0: "a", 1: "a"})) == ()


def test_a_step_that_only_makes_the_state_of_an_optimizer_does_not_join_it_to_another() -> None:
    state = took(1, 1, since=20.0, backward_s=0.0)
    steps = [structs.replace(e, step=e.step + 1) for e in took(1, 8, since=21.0)]
    rank = make_run({0: [*took(0, 10, since=0.0), *state, *steps]}).ranks[0]
    assert reported_steps(rank) == 10 + 9
