"""Sharded optimizers whose updates do not all come back: told by DDP402, not by DDP307."""

import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.model.optimizer_parameter_mismatch import OptimizerParameterMismatch
from msgspec.structs import replace
from recordings import make_run, steps
from replicas import LINE, NAMES, STEP, digests, replica

from ddpdoctor.events import Event, Ownership, Replica
from ddpdoctor.events.pack import pack
from ddpdoctor.run import Run

MISSING = ("body.bias", "head.bias")
MOVING = {0: [1, 2], 1: [3, 4], 2: [5, 6]}


def rank(positions: list[int], *events: Event, group: tuple[int, ...] = (0, 1)) -> list[Event]:
    held = [
        replace(e, parameters=pack(positions)) if isinstance(e, Replica) else e
        for e in replica(group)
    ]
    return [*held, *events, *steps(4, site=STEP)]


def owned(missing: tuple[str, ...]) -> Ownership:
    return Ownership(
        at=0, model=0, kind="Adam", step=2, missing=missing, trained=4, held=2, site=LINE
    )


def run_of(values: dict[int, list[int]], missing: tuple[str, ...] = MISSING, **group: tuple) -> Run:
    return make_run(
        {
            0: rank([0, 2], digests("parameters", MOVING), owned(missing), **group),
            1: rank([1, 3], digests("parameters", values)),
        }
    )


def test_what_another_rank_changes_and_does_not_send():
    run = run_of(MOVING)
    assert ParameterDrift().unobserved(run) is None
    (found,) = ParameterDrift().examine(run)
    assert (found.severity.value, found.ranks, found.subjects) == ("error", (0,), MISSING)
    assert found.location.line == 40
    assert [r.location.line for r in found.related] == [33]
    assert list(OptimizerParameterMismatch().examine(run)) == []


def test_optimizers_that_each_hold_a_part():
    run = make_run(
        {
            0: rank([0, 2], digests("parameters", MOVING), owned(MISSING)),
            1: rank([1, 3], digests("parameters", MOVING), owned((NAMES[0], NAMES[2]))),
        }
    )
    (found,) = ParameterDrift().examine(run)
    assert set(found.subjects) == set(NAMES)
    assert list(OptimizerParameterMismatch().examine(run)) == []


@pytest.mark.parametrize("seen", [True, False])
def test_what_was_held_on_every_rank_and_no_longer_is(seen):
    """A new optimizer on a copy of the model. One record may end before the look at it."""
    gone = replace(owned(tuple(NAMES)), step=6)
    every = rank([0, 1, 2, 3], digests("parameters", MOVING))
    copied = steps(8, optimizer=1, site=STEP)
    run = make_run({0: [*every, *copied, gone], 1: [*every, *copied, *([gone] if seen else ())]})
    assert list(ParameterDrift().examine(run)) == []
    found = list(OptimizerParameterMismatch().examine(run))
    assert [f.ranks for f in found] == ([(0, 1)] if seen else [])


def test_what_comes_back_is_changed_there_too():
    run = run_of(MOVING, ())
    assert list(ParameterDrift().examine(run)) == []
    assert list(OptimizerParameterMismatch().examine(run)) == []


def test_what_the_other_rank_holds_and_does_not_change():
    assert list(ParameterDrift().examine(run_of({k: [1, 2] for k in range(3)}))) == []


@pytest.mark.parametrize("group", [(0,), (0, 2)])
def test_another_model_under_the_same_number(group):
    run = make_run(
        {
            0: rank([0, 2], digests("parameters", MOVING), owned(MISSING), group=group),
            1: rank([1, 3], digests("parameters", MOVING), group=(1, 3)),
        }
    )
    assert list(ParameterDrift().examine(run)) == []
    (found,) = OptimizerParameterMismatch().examine(run)
    assert found.subjects == MISSING


def test_what_no_rank_holds_is_told_of_the_optimizer():
    run = run_of(MOVING, (NAMES[0], *MISSING))
    (found,) = OptimizerParameterMismatch().examine(
        make_run({0: rank([2], owned(MISSING)), 1: rank([2], owned(MISSING))})
    )
    assert found.subjects == MISSING
    (found,) = OptimizerParameterMismatch().examine(run)
    assert found.subjects == (NAMES[0],)
