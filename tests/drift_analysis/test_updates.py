"""DDP402 without a wrapper, on literal events: equal gradients, and updates that differ."""

import msgspec
import pytest
from ddpdoctor.checks.drift.hyperparameter_skew import HyperparameterSkew
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import site
from test_unshared import found_with, run_with, states

from ddpdoctor.events import Hyperparameters, Loaded
from ddpdoctor.events.pack import pack
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Severity

PARTED = (1, 3)


def looks(rank, *, parted=PARTED, still=False, healed=False, own=(), every=False, **fields):
    """Looks before steps 0, 1, 2 and 4. Parameters at `parted` differ from step 1 on; on rank 1
    they do not change at all where they stand `still`. Gradients at `own` are each rank's own."""
    for state in states(rank, **fields):
        parted_now = range(4) if every else parted
        values = [100 * state.step + i + 2 for i in range(4)]
        for i in parted_now if state.step and not (healed and state.step == 4) else ():
            values[i] += 7 * rank
            if still and rank == 1:
                values[i] = i + 2
        gradients = [10 * state.step + i + 2 + rank * (i in own) for i in range(4)]
        yield msgspec.structs.replace(
            state,
            parameters=sum(values),
            exchanged="parameters",
            each=pack([*gradients, *values]),
        )


def found_in(loads=None, **kwargs):
    loads = loads or {}
    return found_with({r: [*loads.get(r, ()), *looks(r, **kwargs)] for r in (0, 1)})


def test_a_rank_that_applies_no_update():
    (found,) = found_in(still=True)
    assert (found.severity, found.ranks, found.steps.first) == (Severity.ERROR, (1,), 1)
    assert found.subjects == ("body.bias", "head.bias")
    assert found.location.line == 9


LOAD = (site(4, "train.py", 5, "load(path)"),
        Loaded(at=0, what="optimizer", model=-1, step=0, site=4, optimizer=0))  # fmt: skip


def test_updates_that_differ_as_one_rank_alone_loaded_the_optimizer():
    (found,) = found_in(loads={1: LOAD})
    assert (found.rule, found.ranks) == ("load-on-some-ranks", (1,))
    assert (found.location.line, found.steps.first) == (5, 1)


def test_a_load_on_every_rank_explains_nothing():
    (found,) = found_in(loads={0: LOAD, 1: LOAD})
    assert (found.rule, found.location.line) == ("unequal-updates", 9)


def test_a_load_of_another_optimizer_explains_nothing():
    event = msgspec.structs.replace(LOAD[1], optimizer=1)
    (found,) = found_in(loads={1: (LOAD[0], event)})
    assert found.rule == "unequal-updates"


def test_updates_that_differ():
    (found,) = found_in()
    assert found.ranks == (0, 1)


@pytest.mark.parametrize("kwargs", [
    pytest.param({"parted": ()}, id="equal"),
    pytest.param({"healed": True}, id="made equal again"),
    pytest.param({"own": (1, 3)}, id="gradients of their own: parts that are each rank's"),
    pytest.param({"apart": (0,), "own": (0,)}, id="other gradients elsewhere"),
    pytest.param({"every": True}, id="none is kept equal, and the exchange is another one"),
])  # fmt: skip
def test_traps(kwargs):
    assert found_in(**kwargs) == []


def test_gradients_that_agree_are_exchanged_by_whatever_means():
    """In hooks of the backward, say: enough is exchanged in each step to make them equal."""
    rows = {}
    for rank in (0, 1):
        rate = Hyperparameters(at=0, optimizer=0, step=0, groups=({"lr": 0.1 + rank},), site=2)
        inside = (
            msgspec.structs.replace(s, exchanged="in backward", elements=100 * s.step)
            for s in looks(rank, every=True)
        )
        rows[rank] = [rate, *inside]
    (found,) = diagnose(run_with(rows), [ParameterDrift(), HyperparameterSkew()]).findings
    assert (found.check, found.rule) == ("hyperparameter-skew", "unknown-line")


def told_with_rates(*rates, **kwargs):
    """All gradients are exchanged by hand; ranks step with these learning rates."""
    rows = {}
    for rank, lr in enumerate(rates):
        rate = Hyperparameters(at=0, optimizer=0, step=0, groups=({"lr": lr},), site=2)
        looks_ = looks(rank, every=True, **kwargs)
        rows[rank] = [rate, *(msgspec.structs.replace(s, exchanged="gradients") for s in looks_)]
    return diagnose(run_with(rows), [ParameterDrift(), HyperparameterSkew()]).findings


def test_a_rate_of_its_own_on_each_rank_explains_what_differs():
    (found,) = told_with_rates(0.1, 0.2)
    assert (found.check, found.steps.first) == ("hyperparameter-skew", 0)
    assert [c.code for c in found.consequences] == ["DDP402"]
    assert [f.code for f in told_with_rates(0.1, 0.1)] == ["DDP402"]


def test_rates_of_ranks_whose_gradients_differ_are_their_own_affair():
    assert [f.code for f in told_with_rates(0.1, 0.2, own=(1,))] == ["DDP402"]


def test_a_rate_that_parts_copies_which_had_been_kept_equal():
    """Each rank sets it by its own loss from some step on, and later looks see the parameters."""
    rows = {}
    for rank in (0, 1):
        rates = [
            Hyperparameters(at=step, optimizer=0, step=step, groups=({"lr": lr},), site=2)
            for step, lr in ((0, 0.1), (3, 0.2 + 0.1 * rank))
        ]
        parted = [
            msgspec.structs.replace(state, parameters=state.parameters + 7 * rank, each="")
            if state.step == 4
            else msgspec.structs.replace(state, each="")
            for state in states(rank)
        ]
        rows[rank] = [*rates, *parted]
    checks = [ParameterDrift(), HyperparameterSkew()]
    (found,) = diagnose(run_with(rows), checks).findings
    assert (found.check, found.steps.first) == ("hyperparameter-skew", 3)
    assert [c.code for c in found.consequences] == ["DDP402"]
