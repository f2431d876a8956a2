"""DDP105 over literal events."""

from __future__ import annotations

from ddpdoctor.checks.launch.process_group_leak import ProcessGroupLeak
from recordings import make_run, site

from ddpdoctor.events import Event, GroupReady, RankExiting


def rank(alive: int) -> list[Event]:
    return [
        site(1, "train.py", 5, "dist.init_process_group()"),
        GroupReady(at=0, group=0, name="0", backend="gloo", ranks=(0, 1), member=True, site=1),
        RankExiting(at=0, how="return", groups_alive=alive),
    ]


def test_left_alive() -> None:
    (finding,) = ProcessGroupLeak().examine(make_run({0: rank(1), 1: rank(1)}))
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 5


def test_destroyed() -> None:
    assert not list(ProcessGroupLeak().examine(make_run({0: rank(0), 1: rank(0)})))


def test_a_rank_failed_anyway() -> None:
    run = make_run({0: rank(1), 1: rank(1)}, ended={0: 0, 1: 1})
    assert not list(ProcessGroupLeak().examine(run))
