"""data-bound: steps that wait for batches, and steps that only seem to."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.performance.data_bound import DataBound
from readers import found, loader, run_of
from recordings import started, steps

from ddpdoctor.events import Event
from ddpdoctor.report.findings import Finding


def part(waits: list[float], step_s: float = 0.1, workers: int = 0) -> list[Event]:
    taken = [s for n, w in enumerate(waits) for s in steps(1, first=n, data_s=w, wall_s=step_s + w)]
    seen = loader(0, [list(range(100))], trains=False, ends={"backwards": 25}, workers=workers)
    return [*seen, *taken]


def examine(*waits: list[float], step_s: float = 0.1) -> list[Finding]:
    return found(DataBound(), run_of(*(part(w, step_s) for w in waits)))


def test_steps_that_wait() -> None:
    (finding,) = examine([0.2] * 20, [0.01] * 20)
    assert finding.ranks == (0,)
    assert finding.location is not None and finding.location.line == 11


@pytest.mark.parametrize(
    ("cores", "workers", "rule"),
    [
        (16, 0, "no-workers"),
        (6, 0, "no-workers"),
        (0, 0, "no-workers"),
        (2, 0, "no-spare-cores"),
        (16, 4, "too-few-workers"),
        (0, 8, "too-few-workers"),
        (6, 4, "no-spare-cores"),
    ],
)
def test_no_more_workers_than_cores_for_them(cores: int, workers: int, rule: str) -> None:
    ranks = ([started(r, 2, cores=cores), *part([0.2] * 20, workers=workers)] for r in range(2))
    (finding,) = found(DataBound(), run_of(*ranks))
    assert finding.rule == rule


def test_warm_up_and_the_beginning_of_epochs() -> None:
    assert not examine([2.0, 1.0, 0.5] + ([0.001] * 9 + [1.0]) * 3)


def test_waits_while_the_device_works() -> None:
    """The host loads the next batch while the device computes the step before."""
    busy = [s for n in range(20) for s in steps(1, first=n, data_s=0.2, wall_s=0.3,
                                                overlapped_s=0.19)]  # fmt: skip
    seen = loader(0, [list(range(100))], trains=False, ends={"backwards": 25})
    assert not found(DataBound(), run_of([*seen, *busy], [*seen, *busy]))


def test_short_waits_of_short_steps() -> None:
    assert not examine([0.004] * 20, step_s=0.001)


def test_batches_that_are_late_now_and_then() -> None:
    """Half of the batches are there at once: the machine is busy, not the loader slow."""
    assert not examine([0.2, 0.0] * 10)


def test_a_small_share() -> None:
    assert not examine([0.03] * 20)


def test_workers_that_are_held_up_for_a_part_of_the_run() -> None:
    assert not examine([0.001, 0.003] * 8 + [0.2, 0.3] * 10)


def test_workers_that_deliver_in_turn() -> None:
    waits = [0.45, 0.2, 0.01] * 8
    slow = [s for n, w in enumerate(waits) for s in steps(1, first=n, data_s=w, wall_s=0.02 + w)]
    seen = loader(0, [list(range(100))], trains=False, ends={"backwards": 25}, workers=3)
    assert found(DataBound(), run_of([*seen, *slow]))


def test_too_few_steps() -> None:
    run = run_of(part([0.5] * 5))
    assert DataBound().unobserved(run) == "fewer than 11 steps"
