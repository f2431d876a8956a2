"""DDP106 over literal events."""

from __future__ import annotations

from ddpdoctor.checks.launch.group_never_formed import GroupNeverFormed
from recordings import make_run, site, steps

from ddpdoctor.events import Event, GroupReady, TrainsAlone


def trains(*layers: str, more: tuple[Event, ...] = ()) -> list[Event]:
    alone = TrainsAlone(at=0, step=0, site=1, layers=layers)
    return [site(1, "train.py", 23, "optimizer.step()"), alone, *more, *steps(4, site=1)]


def test_each_trains_alone() -> None:
    (finding,) = GroupNeverFormed().examine(make_run({0: trains(), 1: trains()}))
    assert finding.ranks == (0, 1)
    assert finding.steps is not None and finding.steps.count == 4
    assert finding.location is not None and finding.location.line == 23


def test_a_call_under_a_condition_that_does_not_hold() -> None:
    alone = TrainsAlone(at=0, step=0, site=1, init_site=2, condition="if self.on:")
    lines = [site(1, "train.py", 23, "optimizer.step()"), site(2, "train.py", 5, "init()")]
    ranks = {n: [*lines, alone, *steps(4, site=1)] for n in range(2)}
    (finding,) = GroupNeverFormed().examine(make_run(ranks))
    assert [r.location.line for r in finding.related] == [5]
    assert "`if self.on:` does not hold" in finding.fix


def test_another_layer_of_communication() -> None:
    run = make_run({0: trains("horovod"), 1: trains("horovod")})
    assert not list(GroupNeverFormed().examine(run))


def test_programs_that_do_not_train() -> None:
    run = make_run({0: [], 1: []})
    assert GroupNeverFormed().unobserved(run)
    assert not list(GroupNeverFormed().examine(run))


def test_one_trains_and_the_others_help() -> None:
    assert not list(GroupNeverFormed().examine(make_run({0: trains(), 1: []})))


def test_a_group_made_after_a_warm_up() -> None:
    ready = GroupReady(at=0, group=0, name="0", backend="gloo", ranks=(0, 1), member=True, site=1)
    run = make_run({r: trains(more=(ready,)) for r in (0, 1)})
    assert not list(GroupNeverFormed().examine(run))


def test_another_way_to_each_other_that_shows_later() -> None:
    later = TrainsAlone(at=1, step=2, site=1, layers=("parameters that change between steps",))
    run = make_run({0: trains(more=(later,)), 1: trains()})
    assert not list(GroupNeverFormed().examine(run))
    assert "between steps" in (GroupNeverFormed().unobserved(run) or "")
