"""DDP311: with torch's error and without."""

import pytest
from ddpdoctor.checks.model.static_graph_broken import StaticGraphBroken
from recordings import make_run
from wraps import codes, rank

from ddpdoctor.events import StaticGraphBroken as Record

CHECK = StaticGraphBroken()


def broken(kind, **more):
    return Record(at=0, model=0, kind=kind, step=4, backward=5, forward_site=52, **more)


@pytest.mark.parametrize("kind", ["changed", "asserted", "silent"])
def test_each_way_it_shows(kind):
    (found,) = CHECK.examine(make_run({r: rank(broken(kind, silent=2)) for r in (0, 1)}))
    assert found.location.line == 5
    assert found.steps.first == 4


def test_accumulation_is_named_as_the_cause():
    (found,) = CHECK.examine(make_run({r: rank(broken("asserted", unsynced=3)) for r in (0, 1)}))
    assert "no_sync" in found.cause


def test_one_process_has_nothing_to_synchronise():
    assert codes(make_run({0: rank(broken("silent", silent=1), ranks=(0,))}), CHECK) == []


def test_a_static_graph():
    assert codes(make_run({r: rank() for r in (0, 1)}), CHECK) == []
