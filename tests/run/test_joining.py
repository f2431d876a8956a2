"""Which processes make the run, where a command formed several groups one after the other."""

from __future__ import annotations

import pytest
from recordings import START, WALL, make_run, started, steps

from ddpdoctor.events import Event, GroupReady, InitEntered, RankExiting, StallSeen
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.registry import all_checks
from ddpdoctor.run import Run

LASTS_S = 100.0


def process(rank: int, world: int, at: float, stepped: int, status: int | None = 0) -> list[Event]:
    """A rank that came at that second; `status` is None where it is not known to have left."""
    entered = InitEntered(
        at=0, backend="gloo", init_method="", rank=rank, world_size=world, env_rank=-1,
        env_world_size=-1, env_local_rank=-1, timeout_s=1800.0, site=-1, rendezvous=f"here:{world}",
    )  # fmt: skip
    ready = GroupReady(
        at=0, group=0, name="0", backend="gloo", ranks=tuple(range(world)), member=True, site=-1
    )
    left = [RankExiting(at=at + LASTS_S, how="return", status=status)] if status is not None else []
    begun = started(rank, world, at=at, wall=WALL - START + at, pid=int(1000 + at + rank))
    return [begun, entered, ready, *steps(stepped), *left]


def one_after_the_other(*, steps_of_two: int, steps_of_four: int, status: int | None) -> Run:
    """Two ranks, and when these are gone, four."""
    four = {r: process(r, 4, 200.0, steps_of_four, status) for r in range(4)}
    return make_run(
        {r: process(r, 2, 10.0, steps_of_two) for r in range(2)} | {r: four[r] for r in (2, 3)},
        twins={r: [four[r]] for r in (0, 1)},
        ended=None,
        world_size=4,
    )


def worlds(run: Run) -> dict[int, int]:
    return {number: len(rank.default_group.ranks) for number, rank in run.ranks.items()
            if rank.default_group}  # fmt: skip


@pytest.mark.parametrize(
    ("two", "four", "status", "told"),
    [(5, 9, 0, 4), (9, 5, 0, 2), (9, 5, None, 4), (9, 5, 1, 4)],
)
def test_all_ranks_are_of_one_group(two: int, four: int, status: int | None, told: int) -> None:
    """Of that which goes on or failed, or else of that which did the most."""
    run = one_after_the_other(steps_of_two=two, steps_of_four=four, status=status)
    assert worlds(run) == dict.fromkeys(range(told), told)
    assert run.world_size == told
    assert len(run.others) == 6 - told
    assert len(run.processes()) == 6


def test_groups_one_after_the_other_are_no_fault() -> None:
    run = one_after_the_other(steps_of_two=9, steps_of_four=5, status=0)
    report = diagnose(run, list(all_checks()))
    assert [f.check for f in report.findings if f.severity != "note"] == []
    assert any("4 processes of the other groups" in line for line in report.coverage.lost)


def test_a_stall_of_one_group_is_not_that_of_the_next() -> None:
    stalled = StallSeen(at=50.0, since=20.0, hang_after=30.0)
    nodes = {0: [stalled]}
    first = {r: process(r, 2, 10.0, 2) for r in range(2)}
    after = {r: [process(r, 2, 200.0, 0, 1)] for r in range(2)}
    run = make_run(first, twins=after, nodes=nodes, ended=None)
    assert len(run.others) == 2
    assert run.stall is None
    assert make_run({r: process(r, 2, 10.0, 2, 1) for r in range(2)}, nodes=nodes, ended=None).stall


def test_launches_that_make_no_group_are_told_apart_by_their_size() -> None:
    two, four = (
        [[started(r, n, at=at, wall=WALL - START + at, script_digest=str(n)), *steps(n)]
         for r in range(n)]
        for n, at in ((2, 10.0), (4, 200.0))
    )  # fmt: skip
    run = make_run(
        {0: two[0], 1: two[1], 2: four[2], 3: four[3]}, twins={0: [four[0]], 1: [four[1]]}
    )
    assert {r.started.world_size for r in run.ranks.values() if r.started} == {4}
    assert len(run.others) == 2


def test_a_process_that_once_was_alone_is_no_rank_of_those_that_it_starts() -> None:
    """A test runner, a notebook."""
    alone = process(0, 1, 10.0, 0, None)
    run = make_run(
        {0: alone, 1: process(1, 2, 20.0, 5)}, twins={0: [process(0, 2, 20.0, 5)]}, ended=None
    )
    assert worlds(run) == {0: 2, 1: 2}


def test_who_left_before_the_others_met_is_a_rank_all_the_same() -> None:
    """It was started with them, and failed before it asked for a group."""
    early = [
        started(1, 2, at=10.0, wall=WALL - START + 10),
        RankExiting(at=11.0, how="return", status=1),
    ]
    wrapper = [
        started(0, 2, at=10.0, wall=WALL - START + 10),
        RankExiting(at=12.0, how="return", status=0),
    ]
    real = process(0, 2, 20.0, 0)
    run = make_run({0: wrapper, 1: early}, twins={0: [real]}, ended=None)
    assert sorted(run.ranks) == [0, 1]
    assert run.others == ()
