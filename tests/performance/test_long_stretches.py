"""straggler and data-bound by sums: time that is lost in some steps only."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.performance.data_bound import DataBound
from ddpdoctor.checks.performance.straggler import Straggler
from ledgers import LedgerOf
from readers import loader
from recordings import make_run

from ddpdoctor.events import GroupReady, Wrapped
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.run import Run

ROUNDS = 8


def run_of(ranks: list[LedgerOf]) -> Run:
    return make_run({r: one.events for r, one in enumerate(ranks)})


def late(
    account: str = "outside", *, seconds: float = 0.5, ranks: int = 2, rounds: int = ROUNDS,
    usual: float = 0.3,
) -> list[LedgerOf]:  # fmt: skip
    """Rank 0 spends time on an account in each stretch of eight steps, the others wait."""
    every = [LedgerOf() for _ in range(ranks)]
    for n in range(1, rounds + 1):
        every[0].steps(8 * n, forward=usual, **{account: seconds})
        for one in every[1:]:
            one.steps(8 * n, forward=usual, waits=seconds)
    return every


def stragglers(ranks: list[LedgerOf]) -> list[Finding]:
    return list(Straggler().examine(run_of(ranks)))


@pytest.mark.parametrize(
    ("account", "line"),
    [("outside", 13), ("loading", 10), ("optimizer", 13), ("evaluation", 20), ("checkpoint", 30)],
)
def test_a_rank_that_is_late_now_and_then(account: str, line: int) -> None:
    (finding,) = stragglers(late(account))
    assert finding.rule == "long-stretches"
    assert (finding.ranks, finding.severity) == ((0,), Severity.WARNING)
    assert finding.location is not None and finding.location.line == line
    assert finding.evidence["long stretches at this line"] == ROUNDS
    assert Straggler().unobserved(run_of(late(account))) is None


def test_the_one_of_four() -> None:
    (finding,) = stragglers(late(ranks=4))
    assert finding.ranks == (0,)


@pytest.mark.parametrize("account", ["evaluation", "checkpoint"])
def test_a_planned_pause_that_takes_a_quarter_is_a_note(account: str) -> None:
    (finding,) = stragglers(late(account, usual=1.5))
    assert finding.severity is Severity.NOTE


def test_less_than_a_fifth_of_the_run() -> None:
    assert not stragglers(late(usual=3.0))


def test_less_than_a_second() -> None:
    assert not stragglers(late(seconds=0.1, usual=0.01))


def test_few_stretches() -> None:
    assert not stragglers(late(seconds=3.0, rounds=3, usual=6.0))
    (finding,) = stragglers(late(seconds=3.0, rounds=3))  # most of the run
    assert finding.evidence["long stretches at this line"] == 3
    assert not stragglers(late(seconds=9.0, rounds=1))


def test_all_ranks_do_the_same_at_the_same_time() -> None:
    ranks = [LedgerOf(), LedgerOf()]
    for n in range(1, ROUNDS + 1):
        for one in ranks:
            one.steps(8 * n, forward=0.1, outside=0.5, waits=0.01)
    assert not stragglers(ranks)


def test_ranks_late_in_turn() -> None:
    """Noise: each stretch has another last rank."""
    ranks = [LedgerOf(), LedgerOf()]
    for n in range(1, ROUNDS + 1):
        ranks[n % 2].steps(8 * n, forward=0.1, outside=0.5)
        ranks[1 - n % 2].steps(8 * n, forward=0.1, waits=0.5)
    assert not stragglers(ranks)


def test_the_others_do_not_wait() -> None:
    ranks = [LedgerOf(), LedgerOf()]
    for n in range(1, ROUNDS + 1):
        ranks[0].steps(8 * n, forward=0.1, outside=0.5)
        ranks[1].steps(8 * n, forward=0.6)
    assert not stragglers(ranks)


def test_time_that_is_lost_at_no_line() -> None:
    """Many short delays add up: the rank is slower in general, which steady windows tell."""
    ranks = [LedgerOf(), LedgerOf()]
    for n in range(1, 10 * ROUNDS + 1):
        ranks[0].steps(8 * n, forward=0.04, outside=0.04, optimizer=0.04)
        ranks[1].steps(8 * n, waits=0.12)
    assert not stragglers(ranks)


def test_waits_on_the_gpu_are_not_seen() -> None:
    ranks = late()
    for one in ranks:
        one.events += [
            GroupReady(at=0, group=0, name="", ranks=(0, 1), backend="nccl", member=True, site=-1),
            Wrapped(at=0, model=0, wrapper="DDP", kind="M", group=0, site=-1, device="cuda:0"),
        ]
    assert not stragglers(ranks)


def slow_starts(
    *, first_s: float = 0.7, epochs: int = 5, workers: int = 2, persistent: bool = False,
    usual: float = 0.2, per_epoch: int = 1,
) -> list[Finding]:  # fmt: skip
    """Ranks whose first batches of each epoch take long."""
    ranks = []
    for _ in range(2):
        one = LedgerOf()
        for n in range(1, epochs + 1):
            for part in range(per_epoch):
                one.steps(10 * n + part, loading=first_s, forward=usual)
        orders = [list(range(100))] * epochs
        seen = loader(
            0, orders, trains=False, ends={"backwards": 25}, workers=workers, loop_site=1, site=5,
            persistent=persistent,
        )  # fmt: skip
        ranks.append([*seen, *one.events])
    return list(DataBound().examine(make_run(dict(enumerate(ranks)))))


def test_workers_that_start_anew_in_each_epoch() -> None:
    (finding,) = slow_starts()
    assert (finding.rule, finding.ranks) == ("slow-epoch-starts", (0, 1))
    assert finding.location is not None and finding.location.line == 20
    assert "persistent_workers=True" in finding.fix


def test_slow_starts_without_workers_to_keep() -> None:
    for workers, persistent in ((0, False), (2, True)):
        (finding,) = slow_starts(workers=workers, persistent=persistent)
        assert "persistent_workers" not in finding.fix


def test_a_start_that_takes_a_small_part_of_the_epoch() -> None:
    assert not slow_starts(usual=2.0)


def test_two_epochs() -> None:
    assert not slow_starts(epochs=2, first_s=3.0)


def test_long_waits_in_the_middle_of_epochs() -> None:
    """Not the start of an epoch: by typical steps, or by nothing."""
    assert not slow_starts(per_epoch=4)


def test_one_long_stretch_is_told_as_one() -> None:
    every = late("loading", seconds=0.06, usual=0.1)
    every[0].steps(80, forward=0.1, loading=13.0)
    every[1].steps(80, forward=0.1, waits=13.0)
    (finding,) = stragglers(every)
    assert "spends 13.0 s in loading, in one stretch" in finding.summary
    assert "at once" in finding.label
    (usual,) = stragglers(late("loading"))
    assert "8 long stretches" in usual.summary
