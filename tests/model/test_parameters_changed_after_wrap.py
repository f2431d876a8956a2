"""DDP306: what DDP does not know or has lost."""

import msgspec
import pytest
from ddpdoctor.checks.model.parameters_changed_after_wrap import ParametersChangedAfterWrap
from ddpdoctor.checks.model.rank_dependent_graph import RankDependentGraph
from recordings import make_run, site, steps
from wraps import codes, rank, unused, use

from ddpdoctor.events import Loaded, ParametersChanged, Replica

CHECK = ParametersChangedAfterWrap()


def changed(kind, **more):
    values = {"names": ("head.weight", "head.bias"), "trained": 2, "communicated": True, "step": 3}
    return ParametersChanged(at=0, model=0, kind=kind, **{**values, "forward_site": 52, **more})


@pytest.mark.parametrize(
    "kind", ["added", "replaced", "unfrozen", "frozen", "converted", "tied", "removed"]
)
def test_each_kind_of_change(kind):
    line = site(60, "train.py", 6, "model.module.head = nn.Linear(4, 2)")
    (found,) = CHECK.examine(make_run({r: rank(line, changed(kind, site=60)) for r in (0, 1)}))
    assert found.location.line == 6
    assert found.subjects == ("head.weight", "head.bias")
    assert found.steps.first == 3


def test_the_forward_where_the_line_was_not_found():
    (found,) = CHECK.examine(make_run({r: rank(changed("added")) for r in (0, 1)}))
    assert found.location.line == 7


def test_what_is_changed_later_in_the_same_way_is_told_too():
    both = ("head.weight", "head.bias", "body.bias")
    more = changed("unfrozen", names=both, trained=3, step=6)
    again = changed("unfrozen", step=7)
    other = changed("frozen", names=("aux.weight",), trained=0, step=6, find_unused=True)
    events = [changed("unfrozen"), more, again, other, *steps(8)]
    (found,) = CHECK.examine(make_run({r: rank(*events) for r in (0, 1)}))
    assert found.subjects == both
    assert (found.steps.first, found.evidence["parameters"]) == (3, 3)
    assert found.evidence["more changes at step"] == [6]


def test_the_steps_that_follow_are_concerned_too():
    (found,) = CHECK.examine(make_run({r: rank(changed("unfrozen"), *steps(8)) for r in (0, 1)}))
    assert (found.steps.first, found.steps.last, found.steps.count) == (3, 7, 5)
    (once,) = CHECK.examine(make_run({r: rank(changed("frozen"), *steps(8)) for r in (0, 1)}))
    assert once.steps.count == 1


@pytest.mark.parametrize("kind", ["frozen", "tied", "removed"])
def test_what_gets_no_gradient_later_is_right_where_ddp_searches(kind):
    run = make_run({r: rank(changed(kind, find_unused=True)) for r in (0, 1)})
    assert codes(run, CHECK) == []


@pytest.mark.parametrize(("thawed", "told"), [((2, 3), 0), ((2,), 1), ((), 1)])
def test_what_is_frozen_for_some_steps_is_for_another_check(thawed, told):
    frozen = changed("frozen", trained=0)
    run = make_run({r: rank(frozen, use(1, {2: 1, 3: 1}, thawed=thawed)) for r in (0, 1)})
    assert len(codes(run, CHECK)) == told


def test_parameters_that_a_load_put_in_are_told_at_the_load():
    lines = site(60, "train.py", 6, "net = build()"), site(61, "train.py", 9, "net.load(state)")
    loaded = [
        Loaded(at=0, what="weights", model=0, step=0, site=n, assigned=n == 61) for n in (61, 60)
    ]
    run = make_run({r: rank(*lines, *loaded, changed("replaced", site=60)) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.location.line == 9


def test_what_one_rank_froze_is_the_reason_that_ranks_differ():
    run = make_run({0: rank(unused([])), 1: rank(changed("frozen", step=0), unused([4, 5]))})
    (frozen,) = CHECK.examine(run)
    (differs,) = RankDependentGraph().examine(run)
    assert CHECK.explains(frozen, differs)


def test_one_process_loses_nothing():
    assert codes(make_run({0: rank(changed("added"), ranks=(0,))}), CHECK) == []


def test_two_changes_are_two_findings():
    run = make_run({r: rank(changed("added"), changed("converted")) for r in (0, 1)})
    assert len(codes(run, CHECK)) == 2


def test_no_change():
    assert codes(make_run({r: rank() for r in (0, 1)}), CHECK) == []


def trained_by(*optimizers):
    """Replicas and steps of one model: optimizer n steps at each moment of `optimizers[n]`."""
    for number, moments in enumerate(optimizers):
        yield Replica(at=0, model=0, optimizer=number, ranks=(0, 1), parameters="")
        for event, at in zip(steps(len(moments), optimizer=number), moments, strict=True):
            yield msgspec.structs.replace(event, at=1 + at)  # 0 stands for any moment


@pytest.mark.parametrize(
    ("optimizers", "seen", "first"),
    [
        ([range(20), [30]], 0, 20),
        ([range(20), range(21, 40)], 5, 24),
        ([range(20), [30], [31]], 0, 20),
        ([range(0, 40, 2), range(1, 41, 2)], 13, 13),
        ([[0], [1]], 1, 1),
        ([range(40)], 25, 25),
    ],
    ids=["in turn", "well into it", "two after it", "together", "one step of each", "one"],
)
def test_steps_of_an_optimizer_that_is_gone_count(optimizers, seen, first):
    event = msgspec.structs.replace(changed("replaced", step=seen), at=26)
    run = make_run({r: rank(*trained_by(*optimizers), event) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.steps.first == first
