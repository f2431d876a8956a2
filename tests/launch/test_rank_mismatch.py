"""DDP101 over literal events."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.launch.rank_mismatch import RankMismatch
from msgspec.structs import replace
from recordings import START, WALL, make_run, site, started, steps

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    Frame,
    GroupReady,
    InitEntered,
    RankExiting,
    StallSeen,
    Wrapped,
)
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Confidence, Finding, Severity

PLACE = "localhost:29500"


def init(rank: int = -1, world: int = -1, env: tuple[int, int] = (-1, -1), **more: object) -> Event:
    fields: dict[str, object] = {"env_local_rank": env[0], "rendezvous": PLACE, "site": 1, **more}
    return InitEntered(
        at=0, backend="gloo", init_method="", rank=rank, world_size=world, env_rank=env[0],
        env_world_size=env[1], timeout_s=-1, **fields,
    )  # fmt: skip


def ready(size: int) -> Event:
    return GroupReady(
        at=0, group=0, name="0", backend="gloo", ranks=tuple(range(size)), member=True, site=1
    )


def process(
    rank: int, world: int, *events: Event, told: bool = True, **more: object
) -> list[Event]:
    """A process that the launcher told its rank, or (`told=False`) that was spawned."""
    said = {"RANK": str(rank), "WORLD_SIZE": str(world)} if told else {}
    return [
        started(rank, world, environment=said, **more),
        site(1, "train.py", 7, "dist.init_process_group(...)"),
        *events,
    ]


def test_world_of_more_than_were_started() -> None:
    run = make_run({r: process(r, 2, init(r, 4, (r, 2))) for r in range(2)})
    (finding,) = RankMismatch().examine(run)
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 7


def test_local_rank_used_as_rank() -> None:
    said = {r: process(r, 4, init(r % 2, 4, (r, 4), env_local_rank=r % 2)) for r in range(4)}
    (finding,) = RankMismatch().examine(make_run(said))
    assert finding.ranks == (2,)


def test_two_processes_with_one_rank() -> None:
    def one() -> list[Event]:
        return process(0, 2, init(0, 2), told=False)

    run = make_run({0: one()}, twins={0: [one()]}, world_size=2)
    (finding,) = RankMismatch().examine(run)
    pids = {row["pid"] for row in finding.evidence["processes"]}
    assert len(pids) == 2


def test_environment_overwritten_by_the_script() -> None:
    sets = site(2, "train.py", 5, 'os.environ["RANK"] = "0"')
    said = {"set_at": {"RANK": 2, "NCCL_ALGO": 2}}
    run = make_run({r: process(r, 2, sets, init(env=(0, 2), **said)) for r in range(2)})
    (finding,) = RankMismatch().examine(run)
    assert finding.ranks == (1,)
    assert [(r.label, r.location.line) for r in finding.related] == [("sets RANK", 5)]


def test_ranks_that_disagree_on_the_world() -> None:
    run = make_run(
        {0: process(0, 2, init(0, 2), told=False), 1: process(1, 3, init(1, 3), told=False)}
    )
    (finding,) = RankMismatch().examine(run)
    assert finding.rule == "world-size-disagreement"


def test_spawned_fewer_than_the_world() -> None:
    run = make_run(
        {r: process(r, 4, init(r, 4), told=False, spawned=2) for r in range(2)}, world_size=4
    )
    (finding,) = RankMismatch().examine(run)
    assert finding.rule == "world-larger-than-spawned"


def test_explicit_arguments_that_agree() -> None:
    run = make_run({r: process(r, 2, init(r, 2, (r, 2)), ready(2)) for r in range(2)})
    assert not list(RankMismatch().examine(run))


def test_the_same_ranks_in_another_order() -> None:
    run = make_run({r: process(r, 2, init(1 - r, 2, (r, 2)), ready(2)) for r in range(2)})
    assert not list(RankMismatch().examine(run))


def test_smaller_groups_that_meet_elsewhere() -> None:
    run = make_run(
        {
            r: process(
                r, 4, init(r % 2, 2, (r, 4), rendezvous=f"localhost:{29500 + r // 2}"), ready(2)
            )
            for r in range(4)
        }
    )
    assert not list(RankMismatch().examine(run))


def test_a_world_of_ones_own_each() -> None:
    run = make_run(
        {r: process(r, 2, init(0, 1, (r, 2), rendezvous=f"store of {r}"), ready(1)) for r in (0, 1)}
    )
    assert not list(RankMismatch().examine(run))


def worlds_of_one(
    *names: str, size: int = 2, spawned: int = 0, wraps: bool = True
) -> list[Finding]:
    """Of two processes that the launcher told who they are by these variables."""

    def one(rank: int) -> list[Event]:
        told = dict(zip(names, (str(rank), str(size)), strict=False))
        entered = init(0, 1, rendezvous=f"store of process {rank}")
        wrapped = Wrapped(at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=0,
                          site=1)  # fmt: skip
        begun = started(0, 1, environment=told, spawned=spawned)
        return [begun, entered, ready(1), *([wrapped] if wraps else []), *steps(3)]

    run = make_run({0: one(0)}, twins={0: [one(1)]}, world_size=1)
    return list(RankMismatch().examine(run))


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_each_trains_in_a_world_of_one(names: tuple[str, str]) -> None:
    (finding,) = worlds_of_one(*names)
    assert finding.confidence is Confidence.SUSPECTED
    assert [row["launcher"] for row in finding.evidence["processes"]] == [
        "rank 0 of 2", "rank 1 of 2",
    ]  # fmt: skip


def test_each_that_was_spawned_trains_in_a_world_of_one() -> None:
    (finding,) = worlds_of_one(spawned=2)
    assert finding.confidence is Confidence.SUSPECTED


def test_workers_spawned_one_by_one_or_without_a_wrapped_model() -> None:
    assert not worlds_of_one(spawned=1)
    assert not worlds_of_one(spawned=2, wraps=False)


def test_processes_side_by_side_that_nobody_launched_as_ranks() -> None:
    assert not worlds_of_one()
    assert not worlds_of_one("SLURM_PROCID", "SLURM_NTASKS", size=1)


def test_somebody_late_is_not_a_mismatch() -> None:
    run = make_run({0: process(0, 2, init(0, 2, (0, 2))), 1: process(1, 2)})
    assert not list(RankMismatch().examine(run))


def test_spawned_again_on_the_same_port() -> None:
    first = process(0, 1, init(0, 1), ready(1), RankExiting(at=0, how="return"), told=False)
    later = process(0, 1, init(0, 1), ready(1), told=False, at=START + 50, wall=WALL + 50)
    run = make_run({0: first}, twins={0: [later]})
    assert not list(RankMismatch().examine(run))


def test_a_spawning_script_under_a_launcher_of_one() -> None:
    parent = process(0, 1, *steps(0))
    child = process(0, 2, init(0, 2), ready(2), told=False)
    run = make_run({0: parent, 1: process(1, 2, init(1, 2), ready(2), told=False)},
                   twins={0: [child]}, world_size=2)  # fmt: skip
    assert not list(RankMismatch().examine(run))


def stuck(place: str, count: int = 2) -> object:
    """Whether it is proven that these ranks wait in vain, half a minute after the launch."""
    said = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    ranks = {
        r: [
            started(r, 2, environment={**said, "RANK": str(r)}),
            site(1, "train.py", 7, "dist.init_process_group(...)"),
            init(r, 4, (r, 2), rendezvous=place),
        ]
        for r in range(count)
    }
    stall = StallSeen(at=START + 40, since=START + 2, hang_after=30)
    (finding,) = RankMismatch().examine(make_run(ranks, nodes={0: [stall]}, ended=None))
    return finding.evidence["stuck"]


def by_hand(ranks: tuple[int, ...], *, formed: bool) -> dict[int, list[Event]]:
    """Four processes of one launcher that take two for all; those from 2 on come first, fail and
    are gone when the others come."""
    words = "[enforce fail at gloo/context.cc:23] rank < size. {} vs 2"
    frames = (Frame(file="/home/user/project/train.py", line=7, function="main", user=True),)
    gone = {
        r: [
            replace(init(r, 2, (r, 4)), at=START + 1),
            ExceptionRaised(
                at=START + 1.1, kind="RuntimeError", message=words.format(r), frames=frames
            ),
            RankExiting(at=START + 1.2, how="exception", status=1),
        ]
        for r in ranks
        if r > 1
    }
    came = {
        r: [replace(init(r, 2, (r, 4)), at=START + 2), *([ready(2)] if formed else [])]
        for r in (0, 1)
    }
    return {r: process(r, 4, *events) for r, events in sorted({**came, **gone}.items())}


@pytest.mark.parametrize("formed", [True, False])
def test_ranks_beyond_the_world_that_are_gone_when_the_others_come(formed: bool) -> None:
    run = make_run(by_hand((2, 3), formed=formed), ended={0: -15, 1: -15, 2: 1, 3: 1})
    report = diagnose(run, [RankMismatch(), FirstFailure()])
    (finding,) = report.findings
    assert (finding.check, finding.ranks) == ("rank-mismatch", (2, 3))
    assert finding.evidence["groups formed"] == int(formed)
    rows: list[dict[str, object]] = finding.evidence["processes"]  # type: ignore[assignment]
    assert [row["init_process_group"] for row in rows] == [f"rank {r} of 2" for r in range(4)]


def test_pairs_that_use_one_address_one_after_the_other() -> None:
    ranks = {}
    for r in range(4):
        at = START + 1 + r // 2
        ranks[r] = process(
            r, 4, replace(init(r % 2, 2, (r, 4)), at=at), replace(ready(2), at=at + 0.1),
            RankExiting(at=at + 0.2, how="return", status=0),
        )  # fmt: skip
    assert not list(RankMismatch().examine(make_run(ranks)))


def test_all_wait_where_only_they_can_meet() -> None:
    assert stuck(PLACE) is True


def test_another_launcher_may_know_the_address() -> None:
    assert stuck("tcp://node-0:1234") is False


def test_a_process_is_still_to_come() -> None:
    assert stuck(PLACE, count=1) is False


@pytest.mark.parametrize(("ranks", "sure"), [((0, 1, 1), True), ((1, 1), False)])
def test_as_many_wait_as_the_world_has_and_two_with_one_rank(
    ranks: tuple[int, ...], sure: bool
) -> None:
    """Wherever they meet: who has the missing rank would be one more than the world has."""
    every = [process(r, 3, init(r, 3, rendezvous="file:/shared"), told=False) for r in ranks]
    first, *twins = (e for e, r in zip(every, ranks, strict=True) if r == 1)
    told = {1: first, **({0: every[0]} if 0 in ranks else {})}
    stall = StallSeen(at=START + 40, since=START + 2, hang_after=30)
    run = make_run(told, twins={1: twins}, nodes={0: [stall]}, world_size=3, ended=None)
    (finding,) = RankMismatch().examine(run)
    assert finding.evidence["stuck"] is sure


def test_why_it_was_not_looked_at() -> None:
    before = make_run({0: process(0, 1, ready(1))})
    assert RankMismatch().unobserved(before) == (
        "init_process_group was called before ddpdoctor was active"
    )
    never = make_run({0: process(0, 1)})
    assert RankMismatch().unobserved(never) == "init_process_group was never called"
    assert RankMismatch().unobserved(make_run({0: process(0, 1, init(), ready(1))})) is None
