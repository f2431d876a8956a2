"""DDP404 on literal events, and how an edit of the state is seen."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.drift.optimizer_state_drift import OptimizerStateDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import START, make_run, site, steps
from replicas import LINE, OTHER, STEP, digests, equal, replica, run_of

from ddpdoctor.events import (
    Edited,
    EpochBegan,
    Hyperparameters,
    Loaded,
    OptimizerSeen,
    Replica,
    ShardStates,
)
from ddpdoctor.events.drift import UNEVEN_STEPS
from ddpdoctor.events.pack import pack
from ddpdoctor.probe.tensors import tensor_watch
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Severity
from ddpdoctor.run import Location

LOAD = Loaded(at=0, what="optimizer", model=0, step=2, site=LINE)


def state(*last):
    return digests("state:exp_avg", {1: [1, 2, 3, 4], 2: last})


def test_equal_state():
    run = run_of({0: [state(1, 2, 3, 4)], 1: [state(1, 2, 3, 4)]})
    assert list(OptimizerStateDrift().examine(run)) == []
    assert OptimizerStateDrift().unobserved(run) is None


def test_loaded_on_one_rank():
    run = run_of({0: [LOAD, state(1, 2, 3, 4)], 1: [state(1, 2, 9, 4)]})
    (finding,) = OptimizerStateDrift().examine(run)
    assert (finding.ranks, finding.location.line) == ((0,), 33)
    assert finding.subjects == ("head.weight",)


def owned(rank, *, moves=(0, 1), lacks=False, parameters=0):
    """The momentum that a rank keeps of its own parameters, the first or the last two, beside a
    stale one of the others; `lacks`: which it did not have at first."""
    mine = (0, 1) if rank == 0 else (2, 3)
    rows = {}
    for step in (1, 2, 4):
        held = [10 * step + i if i in mine and rank in moves else 5 + i for i in range(4)]
        absent = lacks and step == 1
        rows[step] = [0 if absent and i not in mine else v for i, v in enumerate(held)]
    return [
        digests("state:momentum_buffer", rows),
        digests("parameters", {2: [1, 1, 1, 1], 4: [1, 1, 1, 1 + parameters * rank]}),
    ]


@pytest.mark.parametrize(("fields", "found"), [
    ({}, False),
    ({"lacks": True}, False),
    ({"parameters": 1}, True),  # they part
    ({"moves": ()}, False),  # equal everywhere
])  # fmt: skip
def test_a_state_that_one_rank_keeps_for_all(fields, found):
    run = run_of({n: owned(n, **fields) for n in range(2)})
    assert bool(list(OptimizerStateDrift().examine(run))) is found


@pytest.mark.parametrize("count", [1, 2])
def test_whose_steps_are_counted_is_said_where_there_are_several_optimizers(count):
    made = [OptimizerSeen(at=0, optimizer=n, kind="Adam", site=LINE) for n in range(count)]
    moved = [digests("parameters", {2: [1, 1, 1, 1], 3: [1, 1, 1, n]}) for n in range(2)]
    run = run_of({n: [*made, state(1, 2, 3 + n, 4), moved[n]] for n in range(2)})
    (told,), (later,) = OptimizerStateDrift().examine(run), ParameterDrift().examine(run)
    for finding in (told, later):
        assert ("Adam (train.py:33)" in finding.summary) is (count > 1)


def test_parameters_that_drift_after_it_are_its_consequence():
    moved = [digests("parameters", {2: [1, 1, 1, 1], 3: [1, 1, 1, n]}) for n in range(2)]
    run = run_of({0: [LOAD, state(1, 2, 3, 4), moved[0]], 1: [state(1, 2, 9, 4), moved[1]]})
    (cause,), (effect,) = OptimizerStateDrift().examine(run), ParameterDrift().examine(run)
    assert OptimizerStateDrift().explains(cause, effect)
    assert not ParameterDrift().explains(effect, cause)


def test_parameters_that_drifted_before_it_are_not():
    moved = [digests("parameters", {0: [1, 1, 1, n]}) for n in range(2)]
    run = run_of({0: [LOAD, state(1, 2, 3, 4), moved[0]], 1: [state(1, 2, 9, 4), moved[1]]})
    (cause,), (effect,) = OptimizerStateDrift().examine(run), ParameterDrift().examine(run)
    assert not OptimizerStateDrift().explains(cause, effect)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_load_of_both_is_one_fault(wraps):
    """Also where a framework loads the state itself on every rank, when it wraps."""
    load = msgspec.structs.replace(LOAD, at=START)
    before = [msgspec.structs.replace(load, site=STEP, step=0)] * wraps
    weights = msgspec.structs.replace(load, what="weights", site=OTHER)
    moved = [digests("parameters", {2: [1, 1, 1, n]}) for n in range(2)]
    rows = {
        0: [*before, weights, load, moved[0], state(1, 2, 3, 4)],
        1: [*before, moved[1], state(1, 2, 9, 4)],
    }
    checks = [ParameterDrift(), OptimizerStateDrift()]
    (finding,) = diagnose(run_of(rows), checks).findings
    assert (finding.code, finding.location.line, finding.related[0].location.line) == (
        "DDP402", 35, 33,
    )  # fmt: skip
    assert [c.code for c in finding.consequences] == ["DDP404"]


def test_state_that_followed_different_gradients_is_told_with_those():
    gradients = [digests("gradients", {1: [1, 1, 1, n]}) for n in range(2)]
    run = run_of({0: [gradients[0], state(1, 2, 3, 4)], 1: [gradients[1], state(1, 2, 9, 4)]})
    assert list(OptimizerStateDrift().examine(run)) == []


def test_without_state_it_says_so():
    run = run_of({0: [equal("parameters")], 1: [equal("parameters")]})
    assert OptimizerStateDrift().unobserved(run) is not None


def moved_by(key, decay):
    """A state that differs, and parameters that were seen to differ before it, at step 1."""
    options = Hyperparameters(at=0, optimizer=0, step=0, groups=({"weight_decay": decay},))
    moved = [digests("parameters", {0: [1, 1, 1, 1], 1: [1, 1, 1, n]}) for n in range(2)]
    parted = [digests(f"state:{key}", {2: [1, 2, 3 + n, 4]}) for n in range(2)]
    run = run_of({n: [options, moved[n], parted[n]] for n in range(2)})
    (state,), (parameters,) = OptimizerStateDrift().examine(run), ParameterDrift().examine(run)
    own = OptimizerStateDrift().explains(state, parameters)
    assert ParameterDrift().explains(parameters, state) is not own
    return own


def test_state_that_was_changed_on_one_rank_explains_the_parameters():
    assert moved_by("momentum_buffer", 0.0)
    assert moved_by("step", 0.01), "no decay changes a count"


def test_state_may_follow_the_parameters():
    assert not moved_by("momentum_buffer", 0.01), "by way of the weight decay"
    assert not moved_by("slow_weights", 0.0), "a copy of the parameters, for all that is known"


def cleared(step, site=-1, changed=True):
    return Edited(
        at=0, model=0, optimizer=0, kind="state", step=step, changed=changed, site=site
    )  # fmt: skip


def test_state_that_one_rank_clears_is_told_with_it():
    apart = [digests("state:exp_avg", {1: [1, 2, 3, 4], 3: [1, 2, 3, 4 + n]}) for n in range(2)]
    edit = [cleared(2), cleared(3, changed=False)]
    (finding,) = OptimizerStateDrift().examine(run_of({0: [apart[0]], 1: [*edit, apart[1]]}))
    assert (finding.ranks, finding.location.line) == ((1,), 40)
    later = [*edit, cleared(5, LINE)]
    (finding,) = OptimizerStateDrift().examine(run_of({0: [apart[0]], 1: [*later, apart[1]]}))
    assert finding.location.line == 33


def test_state_that_every_rank_clears_explains_nothing():
    apart = [digests("state:exp_avg", {1: [1, 2, 3, 4], 3: [1, 2, 3, 4 + n]}) for n in range(2)]
    (finding,) = OptimizerStateDrift().examine(run_of({n: [cleared(2), apart[n]] for n in (0, 1)}))
    assert finding.ranks == (0, 1)


def remade(ranks, *, equal=False):
    """Of twelve steps the last nine are taken with a new optimizer on these ranks."""
    equal_parameters = digests("parameters", {0: [1, 1, 1, 1]})

    def events(n):
        first = replica()
        last = digests("parameters", {12: [1, 2, 3, 4 if equal else 4 + n]}, point="end")
        parts = [*first, *steps(3 if n in ranks else 12, site=STEP), state(1, 2, 3, 4)]
        if n in ranks:
            new = next(e for e in first if isinstance(e, Replica))
            parts.append(OptimizerSeen(at=0, optimizer=1, kind="SGD", site=LINE, models=(0,)))
            parts.append(msgspec.structs.replace(new, optimizer=1))
        return [*parts, equal_parameters, last]

    return diagnose(
        make_run({n: events(n) for n in range(2)}), [OptimizerStateDrift(), ParameterDrift()]
    ).findings


def test_an_optimizer_that_one_rank_makes_anew():
    (finding,) = remade([1])
    assert (finding.code, finding.ranks, finding.location.line) == ("DDP404", (1,), 33)
    assert [c.code for c in finding.consequences] == ["DDP402"]


def test_optimizers_that_all_make_anew_or_that_leave_copies_equal():
    assert [f.code for f in remade([0, 1])] == ["DDP402"]
    assert not remade([1], equal=True)


@pytest.mark.parametrize("edit", [
    lambda o, p: o.state.clear(),
    lambda o, p: o.state[p]["momentum_buffer"].zero_(),
    lambda o, p: o.state[p].update(momentum_buffer=torch.zeros(3)),
])  # fmt: skip
def test_an_edit_of_the_state_is_seen_without_reading_it(edit):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = tensor_watch.state_mark(optimizer, parameter)
    optimizer.state_dict()
    assert tensor_watch.state_mark(optimizer, parameter) == before
    kept = dict(optimizer.state[parameter])  # no other may get its address
    edit(optimizer, parameter)
    assert tensor_watch.state_mark(optimizer, parameter) != before
    assert kept


def test_lists_of_tensors_in_a_state_are_not_spelled_out():
    class Held(list):
        def __repr__(self):
            raise AssertionError("LBFGS keeps hundreds of tensors in lists")

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = SimpleNamespace(state={parameter: {"old_dirs": Held([torch.ones(2)]), "n_iter": 1}})
    before = tensor_watch.state_mark(optimizer, parameter)
    optimizer.state[parameter]["n_iter"] = 2
    assert tensor_watch.state_mark(optimizer, parameter) != before


LEFT_OUT = UNEVEN_STEPS


def under_join(
    *, equal_before=True, state=True, gradients=(7, 7), after=(5, 6), joined=True, then=4, apart=1
):
    """Two epochs: rank 0 takes two steps in the first, rank 1 one; both take two in the second.
    The loader counts them `apart`, where it also evaluates."""
    ranks = {}
    for n, begin in enumerate((2, 1)):
        values = {begin: 1 if equal_before else n, begin + 1: after[n]}
        ranks[n] = [
            *(EpochBegan(at=0, loader=0, epoch=e * apart, step=s, site=OTHER, joined=joined)
              for e, s in ((0, 0), (1, begin), (2, begin + then))),
            digests("parameters", {k: [9, 9, 9, v] for k, v in values.items()},
                    backwards=tuple(k + 1 for k in values)),
            digests("gradients", {begin: [1, 1, 1, gradients[n]]}, backwards=(begin + 1,)),
            *([digests("state:exp_avg", {1: [1, 2, 3, n]})] if state else []),
            *steps(begin + 2, site=STEP),
        ]  # fmt: skip
    return list(OptimizerStateDrift().examine(run_of(ranks, count=0, left_out=LEFT_OUT)))


@pytest.mark.parametrize("apart", [1, 2])
def test_join_copies_the_model_and_not_the_state(apart):
    (finding,) = under_join(apart=apart)
    assert "from epoch 1 on" in finding.summary
    assert finding.ranks == (0, 1)
    assert finding.evidence["differ"] == "1 of 4 parameters, after 1 step of the epoch"
    assert finding.rule == "uneven-join"
    assert finding.location.line == 35


@pytest.mark.parametrize(
    "facts",
    [
        {"after": (5, 5)},
        {"equal_before": False},
        {"state": False},
        {"gradients": (7, 8)},
        {"joined": False},
        {"then": 1},
    ],
)
def test_join_where_the_copies_stay_equal_or_other_things_part_them(facts):
    assert under_join(**facts) == []


def shards(values: list[int], states: list[int], names: str = "abc") -> ShardStates:
    return ShardStates(
        at=1, optimizer=0, step=0, names=tuple(names), values=pack(values), states=pack(states),
        site=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (([1, 2, 3], [7, 8, 9]), ([4, 5, 6], [7, 8, 9]), True),
        (([1, 2, 3], [7, 8, 9]), ([4, 5, 3], [7, 8, 6]), True),  # of `c` both have the same part
        (([1, 2, 3], [7, 8, 9]), ([4, 5, 6], [7, 8, 6]), False),
        (([1, 2, 3], [7, 8, 9]), ([1, 2, 3], [7, 8, 9]), False),
        (([1, 2, 3], [1, 0, 1]), ([4, 5, 6], [1, 0, 1]), False),
        (([1, 2, 3], [7, 0, 0]), ([4, 5, 6], [7, 0, 0]), False),  # one may be equal by chance
    ],
)
def test_the_state_of_another_ranks_shards(
    first: tuple[list[int], list[int]], second: tuple[list[int], list[int]], found: bool
) -> None:
    loads = site(1, "train.py", 12, "optimizer.load_state_dict(state)")
    run = make_run({n: [loads, shards(*rank)] for n, rank in enumerate((first, second))})
    told = list(OptimizerStateDrift().examine(run))
    assert [f.rule for f in told] == ["state-of-another-shard"] * found
    assert all(f.ranks == (0, 1) and f.location.line == 12 for f in told if f.location)
    assert OptimizerStateDrift().unobserved(run) is None


@pytest.mark.parametrize(
    ("head", "left", "follows"),
    [
        ("for epoch in range(start, epochs):", (0,), True),
        ("if patience_counter >= patience:", (0,), False),
        ("for epoch in range(start, epochs):", (1,), False),
    ],
)
def test_a_loop_that_those_leave_early_who_alone_resumed(head, left, follows):
    run = run_of({0: [LOAD, state(1, 2, 3, 4)], 1: [state(1, 2, 9, 4)]})
    (loaded,) = OptimizerStateDrift().examine(run)
    exited = msgspec.structs.replace(
        loaded, check="rank-exited-early", code="DDP604", rule="loop-exit", ranks=left,
        location=Location("train.py", 8, "main", head),
    )  # fmt: skip
    assert OptimizerStateDrift().explains(loaded, exited) is follows
    others = msgspec.structs.replace(loaded, check="collective-mismatch", code="DDP601",
                                     rule="resumed-on-some-ranks")  # fmt: skip
    assert OptimizerStateDrift().explains(loaded, others)
    epochs = msgspec.structs.replace(exited, check="sampler-seed-skew", rule="different-epochs")
    assert OptimizerStateDrift().explains(loaded, epochs)
    note = msgspec.structs.replace(loaded, severity=Severity.NOTE)
    assert not any(OptimizerStateDrift().explains(note, other) for other in (exited, epochs))
