"""imbalanced-batches: more work on some ranks in most steps."""

from __future__ import annotations

from collections.abc import Container

import pytest
from ddpdoctor.checks.performance.imbalanced_batches import ImbalancedBatches
from ledgers import LedgerOf
from readers import found, prologue, run_of
from recordings import make_run, steps

from ddpdoctor.events import BatchSeen, EpochBegan, Event, ForwardInput, OptimizerSeen
from ddpdoctor.probe.watchers.data import forward_inputs
from ddpdoctor.report.findings import Finding, Steps


def given(sizes: list[int], rows: int = 0) -> list[Event]:
    return [
        ForwardInput(
            at=0, model=0, forward=n, site=4, digest=n + 1, numbers=s, rows=rows or s, fed=False
        )
        for n, s in enumerate(sizes)
    ]


def examine(*sizes: list[int], rows: int = 0) -> list[Finding]:
    return found(ImbalancedBatches(), run_of(*(given(s, rows) for s in sizes)))


def test_one_rank_with_larger_batches() -> None:
    (finding,) = examine([12] * 20, [4] * 20)
    assert finding.ranks == (0,)
    assert finding.location is not None and finding.location.line == 21


def test_the_steps_of_the_models_own_optimizer() -> None:
    def rank(size: int) -> list[Event]:
        seen = [
            OptimizerSeen(at=0, optimizer=0, kind="SGD", site=-1, models=(1,)),
            *steps(50),
            OptimizerSeen(at=0, optimizer=1, kind="SGD", site=-1, models=(0,)),
        ]
        # two forwards to a step; the first ones are alike
        forwards = given([8] * 4 + [size] * 16)
        pairs = zip(forwards[::2], forwards[1::2], steps(10, optimizer=1), strict=True)
        return [*seen, *(e for pair in pairs for e in pair)]

    (finding,) = found(ImbalancedBatches(), run_of(rank(12), rank(4)))
    assert finding.steps == Steps(2, 9, 8, 10)


@pytest.mark.parametrize(
    ("reduction", "weights", "severity"),
    [
        ("mean", (1.0, 1.0), "warning"),
        ("mean", (1.5, 0.5), "note"),
        ("sum", (0.125, 0.125), "note"),
        ("sum", (1 / 12, 1 / 4), "warning"),
    ],
)
def test_sizes_that_the_loss_makes_up_for(
    reduction: str, weights: tuple[float, float], severity: str
) -> None:
    ranks = [
        [
            *given([size] * 20),
            BatchSeen(at=0, model=0, forward=0, size=size, reduction=reduction, weight=weight),
        ]
        for size, weight in zip((12, 4), weights, strict=True)
    ]
    (finding,) = found(ImbalancedBatches(), run_of(*ranks))
    assert finding.severity.value == severity


def test_lengths_that_vary_by_themselves() -> None:
    (finding,) = examine([10, 90] * 8, [90, 10] * 8)
    assert finding.ranks == (0, 1)
    assert finding.severity.value == "note", "nothing is known to be lost"


@pytest.mark.parametrize(
    ("times", "severity"),
    [
        ({"forward": 3.0, "backward": 7.0, "waits": 3.0}, "warning"),
        ({"forward": 0.3, "backward": 0.7, "waits": 0.4}, "note"),
        ({"forward": 3.0, "backward": 7.0, "waits": 0.5}, "note"),
        ({"forward": 1.0, "backward": 1.0, "outside": 20.0, "waits": 5.0}, "note"),
    ],
    ids=["lost", "a second", "hardly waited", "time elsewhere"],
)
def test_what_lengths_that_vary_cost(times: dict[str, float], severity: str) -> None:
    sizes = ([10, 90] * 8, [90, 10] * 8)
    ranks = [[*given(s), *LedgerOf().steps(8, **times).events] for s in sizes]
    (finding,) = found(ImbalancedBatches(), run_of(*ranks))
    assert finding.severity.value == severity


def test_a_rank_that_has_more_in_some_steps_only_is_not_blamed() -> None:
    (finding,) = examine([90] * 12 + [10] * 6, [10] * 12 + [90] * 6, rows=4)
    assert finding.ranks == (0, 1)


def test_longer_samples_are_no_larger_batch_size() -> None:
    (finding,) = examine([90] * 18, [10] * 18, rows=4)
    assert finding.ranks == (0,)


def test_only_the_last_batch() -> None:
    assert not examine([8] * 20 + [8], [8] * 20 + [1])


def looked_at(forwards: int, larger: Container[int]) -> list[Finding]:
    """Rank 1 has the larger batch in some forwards, of which the probe looks at some."""
    every = [given([size if n in larger else 4 for n in range(forwards)]) for size in (4, 12)]
    sampled = [[e for n, e in enumerate(events) if forward_inputs.sampled(n)] for events in every]
    return found(ImbalancedBatches(), run_of(*sampled))


def test_larger_from_a_later_step_on() -> None:
    (finding,) = looked_at(60, range(20, 60))
    assert (finding.ranks, finding.evidence["forwards compared"]) == ((1,), 5)


@pytest.mark.parametrize(
    "larger",
    [range(40, 60), range(0, 60, 8), {24, 32, 40}, range(13, 20), {5, *range(24, 60)}],
    ids=["few seen", "every eighth", "over again", "a while", "one before"],
)
def test_larger_in_some_later_steps(larger: Container[int]) -> None:
    assert not looked_at(60, larger)


def test_the_last_forwards_of_a_short_run() -> None:
    assert not looked_at(16, range(11, 16))


def test_little_difference() -> None:
    assert not examine([100, 90] * 8, [90, 100] * 8)


def test_too_few_steps() -> None:
    assert not examine([12] * 3, [4] * 3)


def test_inside_join() -> None:
    joined = EpochBegan(at=0, loader=0, epoch=0, step=0, site=3, joined=True)
    run = make_run({r: [*prologue(2), joined, *given([4 + 8 * r] * 20)] for r in range(2)})
    assert not found(ImbalancedBatches(), run)
