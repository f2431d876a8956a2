"""DDP703 over literal events."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.performance.communication_bound import CommunicationBound
from recordings import make_run, site, started

from ddpdoctor.events import Event, Pace, StepDone, SyncPattern, SyncTimes, Wrapped
from ddpdoctor.report.findings import Finding, Severity

MB = 1 << 20


def rank(communication: float, overlap: float, *buckets: int) -> list[Event]:
    """A rank whose step computes for 0.1 s; times in seconds, buckets in megabytes."""
    return [
        site(1, "train.py", 17, "net_ddp = DDP(net)"),
        Wrapped(
            at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=0, site=1
        ),
        SyncTimes(
            at=0, model=0, iterations=11, forward_s=0.04, backward_s=0.06,
            communication_s=communication, overlap_s=overlap,
            bucket_bytes=tuple(b * MB for b in buckets or (1, 25)),
        ),
    ]  # fmt: skip


def found(*ranks: list[Event]) -> list[Finding]:
    return list(CommunicationBound().examine(make_run(dict(enumerate(ranks)))))


def test_much_of_the_step() -> None:
    (finding,) = found(rank(0.15, 0.05), rank(0.16, 0.05))
    assert finding.severity is Severity.NOTE
    assert finding.location is not None and finding.location.line == 17


def test_small_buckets() -> None:
    (finding,) = found(*(rank(0.15, 0.05, *(1,) * 9) for _ in range(2)))
    assert "bucket_cap_mb" in finding.fix


def test_hidden_behind_the_backward() -> None:
    assert not found(rank(0.15, 0.14), rank(0.15, 0.14))


def test_only_waiting_for_a_slower_rank() -> None:
    assert not found(rank(0.5, 0.0), rank(0.01, 0.005))


def without_a_core(seconds: float) -> Event:
    return Pace(
        at=0, optimizer=0, step=15, count=8, wall_s=0.2, waited_s=0.1, own_s=(), delayed_s=seconds
    )


@pytest.mark.parametrize(("seconds", "told"), [(0.03, False), (0.02, True)])
def test_ranks_that_take_turns_on_a_core(seconds: float, told: bool) -> None:
    """100 of 200 ms, of which a quarter must be left."""
    ranks = [[*rank(0.15, 0.05), without_a_core(seconds)] for _ in range(2)]
    assert bool(found(*ranks)) is told


def test_ranks_that_take_turns_on_several_nodes_do_so_at_once() -> None:
    ranks = [
        [started(n, 4, node=f"node{n // 2}"), *rank(0.15, 0.05), without_a_core(0.02)]
        for n in range(4)
    ]
    assert found(*ranks)


@pytest.mark.parametrize(("cores", "told"), [(1, False), (2, True), (0, True)])
def test_fewer_cores_than_ranks_where_the_turns_were_not_measured(cores: int, told: bool) -> None:
    ranks = [[started(n, 2, cores=cores), *rank(0.15, 0.05)] for n in range(2)]
    assert bool(found(*ranks)) is told


def test_timed_steps_that_were_longer_than_all_later_ones() -> None:
    (finding,) = found(*(accumulating(1, 0, 0.15) for _ in range(2)))
    assert finding.rule == "one-backward-per-step"
    assert not found(*(accumulating(1, 0, 0.13) for _ in range(2)))


def test_a_few_milliseconds() -> None:
    events = SyncTimes(
        at=0, model=0, iterations=11, forward_s=1e-3, backward_s=1e-3, communication_s=5e-3,
        overlap_s=0.0,
    )  # fmt: skip
    assert not found([events], [events])


def test_too_short() -> None:
    assert CommunicationBound().unobserved(make_run({0: []}))


def accumulating(synced: int, unsynced: int, wall: float) -> list[Event]:
    """Steps of so many backwards; the last of the run has fewer."""
    pattern = SyncPattern(at=0, model=0, optimizer=0, step=0, synced=synced, unsynced=unsynced)
    last = SyncPattern(at=0, model=0, optimizer=0, step=11, synced=1, unsynced=1)
    steps = [StepDone(at=n * wall, optimizer=0, step=n, site=-1, wall_s=wall) for n in range(12)]
    return [*rank(0.15, 0.05), pattern, *steps, last]


def test_the_share_is_one_of_the_optimizers_step() -> None:
    assert not found(*(accumulating(1, 5, 0.8) for _ in range(2)))


def test_more_accumulation_where_there_is_some() -> None:
    (finding,) = found(*(accumulating(1, 1, 0.3) for _ in range(2)))
    assert finding.rule == "already-accumulating"


def test_every_backward_averages() -> None:
    (finding,) = found(*(accumulating(4, 0, 0.9) for _ in range(2)))
    assert finding.rule == "every-backward-synchronised"


def test_a_model_too_small_to_take_time() -> None:
    *others, _ = rank(0.15, 0.05)
    times = SyncTimes(
        at=0, model=0, iterations=11, forward_s=0.04, backward_s=0.06, communication_s=0.15,
        overlap_s=0.05, bucket_bytes=(70_000,),
    )  # fmt: skip
    assert not found(*[[*others, times]] * 2)


def test_a_quarter_of_the_whole_step() -> None:
    assert found(*(accumulating(1, 0, 0.36) for _ in range(2)))
    assert not found(*(accumulating(1, 0, 0.44) for _ in range(2)))
