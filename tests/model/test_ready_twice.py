"""DDP310: which of the causes it was."""

import pytest
from ddpdoctor.checks.model.ready_twice import ReadyTwice
from ddpdoctor.checks.model.unused_parameter import UnusedParameter
from recordings import make_run, site
from wraps import codes, rank, unused, use

from ddpdoctor.events import ModulesSkipped
from ddpdoctor.events import ReadyTwice as Record

CHECK = ReadyTwice()


def twice(**more):
    return Record(at=0, model=0, step=2, parameter="head.bias", site=51, **more)


@pytest.mark.parametrize(
    ("facts", "rule", "line"),
    [
        ({"nested": 3, "find_unused": True, "checkpoint_site": 60}, "reentrant-checkpoint", 30),
        ({"nested": 3}, "reentrant-checkpoint", 8),
        ({"backwards": 1}, "second-backward", 8),
        ({"find_unused": True}, "used-outside-forward", 8),
        ({}, "used-more-than-once", 8),
    ],
)
def test_the_cause(facts, rule, line):
    made = site(60, "net.py", 30, "x = checkpoint(block, x, use_reentrant=True)")
    (found,) = CHECK.examine(make_run({r: rank(made, twice(**facts)) for r in (0, 1)}))
    assert (found.rule, found.location.line) == (rule, line)
    assert found.subjects[0] == "head.bias"


@pytest.mark.parametrize(
    ("skipped", "forwards", "several"),
    [
        ([(3, "aux"), (3, "head")], 2, True),
        ([(3, "head"), (3, "aux")], 2, False),
        ([(3, "head")], 2, False),
        ([(1, "aux"), (3, "head")], 2, False),
        ([(3, "body"), (3, "aux")], 2, False),
        ([(3, "body"), (3, "aux")], 4, True),
    ],
)
def test_forwards_that_use_different_parameters(skipped, forwards, several):
    watched = [ModulesSkipped(at=0, model=0, backward=n, names=(name,)) for n, name in skipped]
    event = twice(find_unused=True, forwards=forwards, forward_site=52, backward=3)
    (found,) = CHECK.examine(make_run({r: rank(*watched, event) for r in (0, 1)}))
    assert found.location.line == (7 if several else 8)


def test_a_run_that_works():
    assert codes(make_run({r: rank() for r in (0, 1)}), CHECK) == []


@pytest.mark.parametrize(
    ("step", "backwards", "folded"), [(2, 1, True), (1, 1, False), (2, 0, False)]
)
def test_what_the_first_of_two_backwards_leaves_to_the_second(step, backwards, folded):
    left = unused([4, 5], step=step, backward=step + 1, called=("", "body", "head", "aux"))
    events = rank(left, use(step + 1, {4: 1, 5: 1}), twice(backwards=backwards))
    run = make_run(dict.fromkeys((0, 1), events))
    (mine,), (other,) = CHECK.examine(run), UnusedParameter().examine(run)
    assert CHECK.explains(mine, other) is folded
