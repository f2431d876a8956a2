"""DDP303: the option is needless only where every rank looked, and nothing was unused."""

import msgspec
import pytest
from ddpdoctor.checks.model.needless_find_unused_parameters import NeedlessFindUnusedParameters
from recordings import make_run
from wraps import codes, rank, unused, use

from ddpdoctor.events import SearchCost, SyncPattern
from ddpdoctor.report.findings import Confidence

CHECK = NeedlessFindUnusedParameters()
ASKED = {"find_unused": True}


def test_needless_and_what_it_cost():
    cost = SearchCost(at=0, model=0, searches=10, seconds=0.02)
    run = make_run({r: rank(unused([], **ASKED), use(10), cost) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.evidence["search ms per step"] == 2.0
    assert found.location.line == 5


def test_needed_in_one_step_on_one_rank():
    fine = rank(unused([], **ASKED), use(10))
    needed = rank(unused([], **ASKED), unused([4], backward=7, **ASKED), use(10, {4: 1}))
    assert codes(make_run({0: fine, 1: needed}), CHECK) == []


def test_too_few_backwards():
    run = make_run({r: rank(unused([], **ASKED), use(4)) for r in (0, 1)})
    assert codes(run, CHECK) == []


def test_a_rank_that_was_not_watched():
    run = make_run({0: rank(unused([], **ASKED), use(10)), 1: rank()})
    assert codes(run, CHECK) == []


def test_without_the_option_and_without_a_search():
    """With a static graph DDP searches once."""
    for asked in ({}, {**ASKED, "static_graph": True}):
        run = make_run({r: rank(unused([], **asked), use(10)) for r in (0, 1)})
        assert codes(run, CHECK) == []


@pytest.mark.parametrize(("backwards", "all_seen"), [(10, True), (17, False)])
def test_backwards_that_were_not_looked_at_are_told(backwards, all_seen):
    seen = msgspec.structs.replace(use(10), backwards=backwards)
    (found,) = CHECK.examine(make_run({r: rank(unused([], **ASKED), seen) for r in (0, 1)}))
    assert (found.confidence is Confidence.PROVEN) is all_seen


@pytest.mark.parametrize("unsynced", [0, 3])
def test_a_static_graph_is_proposed_where_it_would_work(unsynced):
    pattern = SyncPattern(at=0, model=0, optimizer=0, step=0, synced=1, unsynced=unsynced)
    run = make_run({r: rank(unused([], **ASKED), use(10), pattern) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.rule == "needless-find-unused-parameters"


def test_a_run_that_ended_badly_perhaps_where_one_was_left_out():
    events = rank(unused([], **ASKED), use(10))
    assert codes(make_run({0: events, 1: events}, ended={0: 0, 1: 1}), CHECK) == []
