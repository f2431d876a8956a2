"""DDP402 on literal events."""

import copy
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from ddpdoctor.checks.drift.optimizer_state_drift import OptimizerStateDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import steps
from replicas import LINE, OTHER, STEP, digests, equal, run_of, sketch

from ddpdoctor.analysis.replicas.replicas import divergence, replicas
from ddpdoctor.events import (
    Clipped,
    Edited,
    EpochBegan,
    EpochEnded,
    Hyperparameters,
    Loaded,
    OptimizerSeen,
    ParameterWrite,
    Place,
    ProbeTrouble,
    Rewritten,
    Statement,
    StepDone,
    Watched,
)
from ddpdoctor.events.drift import UNEVEN_STEPS, UNHELD, chosen
from ddpdoctor.events.pack import pack
from ddpdoctor.probe.recording.code_locations import Sites
from ddpdoctor.probe.watchers.gradients import state_loading
from ddpdoctor.probe.watchers.gradients.hyperparameters import HyperparameterWatch
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits
from ddpdoctor.probe.watchers.gradients.state_loading import StateLoading
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Severity, Steps

SAME = {0: [1, 2, 3, 4], 1: [5, 6, 7, 8], 2: [9, 8, 7, 6]}
APART = {0: [1, 2, 3, 4], 1: [5, 6, 70, 8], 2: [9, 8, 70, 6]}


def load(site=LINE, step=0):
    return Loaded(at=0, what="weights", model=0, step=step, site=site)


def edit(changed=True, step=0, site=-1):
    return Edited(
        at=0, model=0, optimizer=0, kind="parameters", step=step, changed=changed, site=site
    )


def test_equal_copies_are_left_alone():
    run = run_of({n: [equal("parameters")] for n in range(3)})
    assert list(ParameterDrift().examine(run)) == []
    assert ParameterDrift().unobserved(run) is None


def test_the_tensor_the_step_and_the_rank_are_named():
    ranks = {n: [digests("parameters", APART if n == 2 else SAME)] for n in range(4)}
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.severity is Severity.ERROR
    assert finding.subjects == ("head.weight",)
    assert finding.ranks == (2,)
    assert (finding.steps.first, finding.steps.count) == (1, 2)
    assert finding.evidence["last_equal_at_step"] == 0
    assert finding.location.line == 40


@pytest.mark.parametrize(("second", "unseen"), [(1, range(1, 1)), (16, range(1, 16))])
def test_where_steps_were_not_looked_at_it_may_have_begun_in_any_of_them(second, unseen):
    ranks = {
        n: [digests("parameters", {0: SAME[0], second: (APART if n == 2 else SAME)[1]})]
        for n in range(4)
    }
    run = run_of(ranks)
    (finding,) = ParameterDrift().examine(run)
    assert (finding.rule, finding.steps.first) == ("unknown-cause", second)
    (group,) = replicas(run)
    assert list(divergence(group, "parameters").unseen) == list(unseen)


def ends_after(count, *, backwards=4, values=(1, 2, 3, 4)):
    """Ranks that are alike before step 0, with `count` steps of the optimizer in the end."""
    return [
        digests("parameters", {0: SAME[0]}, backwards=(1,)),
        *steps(count, site=STEP),
        digests("parameters", {4: values}, point="end", backwards=(backwards,)),
    ]


@pytest.mark.parametrize(("last", "told"), [
    (ends_after(2, values=(1, 2, 70, 4)), True),
    (ends_after(4, values=(1, 2, 70, 4)), False),  # no step was left out
    (ends_after(2), False),  # it made no difference
    (ends_after(2, backwards=2, values=(1, 2, 70, 4)), False),  # the run was over for it
    (ends_after(5, values=(1, 2, 70, 4)), False),  # it stepped twice
])  # fmt: skip
def test_steps_that_one_rank_leaves_out_near_the_end(last, told):
    run = run_of({0: ends_after(4), 1: last, 2: ends_after(4)}, count=0)
    found = [f for f in ParameterDrift().examine(run) if f.severity is Severity.ERROR]
    assert [f.ranks for f in found] == ([(1,)] if told else [])
    for finding in found:
        assert finding.steps.first == 2


def test_a_load_on_one_rank_is_the_cause():
    ranks = {0: [load(step=1), digests("parameters", APART)], 1: [digests("parameters", SAME)]}
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.location.line == 33
    assert finding.ranks == (0,)


@pytest.mark.parametrize("step", [0, 1])
def test_the_condition_under_which_one_rank_alone_loads(step):
    resume = Place(OTHER, (Statement(line=34, text="if rank == 0:"),))
    loads = msgspec.structs.replace(load(step=step), places=(Place(LINE), resume))
    (finding,) = ParameterDrift().examine(run_of({0: [loads, last(True)], 1: [last(False)]}))
    assert (finding.rule, finding.location.line) == ("load-on-some-ranks", 33)
    assert finding.related[0].location.line == 34
    assert finding.fix.startswith("run `another_line()` on every rank: move it out of")


def test_an_edit_on_one_rank_is_the_cause():
    ranks = {
        0: [edit(changed=False), digests("parameters", SAME)],
        1: [edit(step=1, site=OTHER), digests("parameters", APART)],
    }
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert (finding.location.line, finding.ranks) == (35, (1,))


@pytest.mark.parametrize(
    ("later", "text", "fix"),
    [
        ([edit(False, 1), edit(True, 1), edit(True, 2, OTHER)], "in every step", "do it on every"),
        ([edit(False, 1)], "between the wrap and the first step", "do it before"),
        ([edit(True, 1), edit(False, 2)], "between the wrap and the first step", "do it before"),
    ],
)
def test_an_edit_in_every_step_is_none_after_the_wrap_alone(later, text, fix):
    apart = {k: [*v[:3], 4 + k] for k, v in SAME.items()}
    ranks = {
        0: [edit(), *later, digests("parameters", apart)],
        1: [digests("parameters", {k: [*v[:3], 0] for k, v in SAME.items()})],
    }
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.ranks == (0,)


@pytest.mark.parametrize(
    ("distance", "editing", "copied", "severity"),
    [(1e-8, 2, True, "warning"), (0.1, 2, False, "error"), (1e-8, 1, True, "error")],
)
def test_what_is_taken_back_by_arithmetic_leaves_rounding_errors(
    distance, editing, copied, severity
):
    """Ranks add something of their own in every step, and subtract it again."""
    last = edit(False, 4)  # none follows
    mine = [edit(), edit(False, 1), edit(True, 1), edit(True, 2, OTHER), last]
    ranks = {
        n: [
            *(mine if n < editing else [edit(changed=False)]),
            digests("parameters", {k: [*v[:3], 4 + n] for k, v in SAME.items()}),
            sketch(1, 1 + n * distance),
        ]
        for n in range(2)
    }
    (finding,) = ParameterDrift().examine(run_of(ranks, count=4))
    assert (finding.ranks, finding.location.line) == (tuple(range(editing)), 35)
    assert (finding.severity.value, "on every rank" in finding.fix) == (
        severity,
        severity == "error",
    )


def test_an_edit_that_one_rank_does_not_take_back_is_the_cause():
    whole = msgspec.structs.replace(edit(False, 1, LINE), more=(OTHER,), undone=True)
    ranks = {
        0: [whole, digests("parameters", SAME)],
        1: [edit(step=1, site=LINE), digests("parameters", APART)],
    }
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert (finding.location.line, finding.ranks) == (35, (1,))


def test_size_and_growth_are_told():
    ranks = {
        0: [digests("parameters", SAME), sketch(1, 1.0), sketch(2, 1.0), sketch(7, 1.0)],
        1: [digests("parameters", APART), sketch(1, 1.1), sketch(2, 2.0), sketch(7, 1.0)],
    }
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.evidence["relative_distance_by_step"] == {1: "0.01", 2: "0.1"}
    assert finding.evidence["grows"] == "yes"


@pytest.mark.parametrize("stride", [2, 4])
def test_ranks_that_look_at_different_shares_are_compared_where_both_looked(stride):
    rows = {n: [7, 7, 7, 7] for n in range(16)}
    other = {n: [7, 7, 8, 7] for n in range(16)}
    ranks = {0: [digests("parameters", rows)], 1: [digests("parameters", other, stride=stride)]}
    (finding,) = ParameterDrift().examine(run_of(ranks, count=16))
    assert finding.subjects == ("head.weight",)
    assert (
        list(
            ParameterDrift().examine(
                run_of({**ranks, 1: [digests("parameters", rows, stride=stride)]})
            )
        )
        == []
    )


def test_copies_that_come_together_again_are_local_sgd():
    healed = {**APART, 3: [1, 1, 1, 1]}
    ranks = {
        0: [digests("parameters", {**SAME, 3: [1, 1, 1, 1]})],
        1: [digests("parameters", healed)],
    }
    assert list(ParameterDrift().examine(run_of(ranks))) == []
    ranks[0].append(load(step=3))
    assert list(ParameterDrift().examine(run_of(ranks)))


def test_copies_that_a_sharded_optimizer_sends_around_were_edited_all_the_same():
    seen = OptimizerSeen(at=0, optimizer=0, kind="ZeroRedundancyOptimizer", site=LINE)
    rows = [digests("parameters", {1: [1, 1, 1, n // 2], 2: [2, 2, 2, 2]}) for n in range(3)]
    ranks = {n: [seen, rows[n]] for n in range(3)}
    ranks[2].append(edit(step=1, site=OTHER))
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert (finding.ranks, finding.location.line, finding.steps.count) == ((2,), 35, 1)


def test_local_sgd_that_was_recognised_is_left_out():
    ranks = {0: [digests("parameters", SAME)], 1: [digests("parameters", APART)]}
    assert list(ParameterDrift().examine(run_of(ranks, left_out="local SGD"))) == []


@pytest.mark.parametrize(("batches", "told"), [((3, 3), True), ((3, 4), False), ((), False)])
def test_join_does_nothing_where_ranks_have_as_many_batches(batches, told):
    """It makes the copies equal at its end, which hides what set them apart."""
    rows = [{1: [1] * 4, 2: [2] * 4, 3: [3] * 4}, {1: [1] * 4, 2: [2, 2, 2, 9], 3: [3] * 4}]
    ranks = {n: [digests("parameters", rows[n])] for n in range(2)}
    for n, count in enumerate(batches):
        ranks[n] += [
            EpochBegan(at=0, loader=0, epoch=0, step=0, site=OTHER, joined=True),
            EpochEnded(at=0, loader=0, epoch=0, batches=count, samples=0, backwards=count,
                       exhausted=True),
        ]  # fmt: skip
    run = run_of(ranks, left_out=UNEVEN_STEPS)
    assert bool([*ParameterDrift().examine(run)]) is told
    assert bool(ParameterDrift().left_out(run)) is not told


def test_ranks_of_different_groups_are_not_compared():
    from recordings import make_run
    from replicas import replica

    ranks = {}
    for n in range(4):
        group, rows = ((0, 1), SAME) if n < 2 else ((2, 3), APART)
        ranks[n] = [*replica(ranks=group), digests("parameters", rows)]
    run = make_run(ranks)
    assert list(ParameterDrift().examine(run)) == []


def test_without_copies_nothing_can_be_said():
    from recordings import make_run

    assert "no two ranks" in ParameterDrift().unobserved(make_run({0: [], 1: []}))


def test_an_edit_that_was_made_some_steps_before_the_copies_were_seen_to_differ():
    values = [digests("parameters", {1: [1, 1, 1, 1], 9: [1, 1, 1, n // 2]}) for n in range(3)]
    edits = [
        Edited(at=0, model=0, optimizer=0, kind="parameters", step=step, changed=step == 4)
        for step in (4, 5)
    ]
    run = run_of({0: [values[0]], 1: [values[1]], 2: [*edits, values[2]]})
    (finding,) = ParameterDrift().examine(run)
    assert finding.ranks == (2,)
    (other,) = ParameterDrift().examine(
        run_of({0: [*edits, values[0]], 1: [values[1]], 2: [values[2]]})
    )
    assert other.rule == "unknown-cause"


def test_without_a_majority_the_rank_that_edited_since_they_were_equal_is_named():
    def told(step):
        edits = [
            Edited(at=0, model=0, optimizer=0, kind="parameters", step=n, changed=n == step)
            for n in (step, step + 1)
        ]
        values = [digests("parameters", {4: [1] * 4, 9: [1, 1, 1, n]}) for n in range(2)]
        (finding,) = ParameterDrift().examine(run_of({0: [*edits, values[0]], 1: [values[1]]}))
        return finding

    assert told(7).ranks == (0,)


def test_a_distance_takes_a_sketch_of_each_side():
    values = {n: digests("parameters", APART if n else SAME) for n in range(3)}
    one_side = {0: [values[0]], 1: [values[1], sketch(1, 2.0)], 2: [values[2], sketch(1, 2.0)]}
    (finding,) = ParameterDrift().examine(run_of(one_side))
    assert "relative_distance_by_step" not in finding.evidence
    both = one_side | {0: [values[0], sketch(1, 1.0)]}
    (finding,) = ParameterDrift().examine(run_of(both))
    assert finding.evidence["relative_distance_by_step"] == {1: "0.1"}


def last(value):
    """Equal but for the last tensor."""
    return digests("parameters", {1: [1, 1, 1, value]})


@pytest.mark.parametrize(
    ("distance", "told"), [(9.99, "1"), (12.0, "1.2"), (0.02, "0.002"), (0, "below 1e-6")]
)
def test_how_far_copies_are_apart_is_told_without_exponents(distance, told):
    run = run_of({n: [last(n), sketch(1, n * distance)] for n in range(2)})
    (finding,) = ParameterDrift().examine(run)
    assert finding.evidence["relative_distance_by_step"] == {1: told}


def test_one_tensor_differs_and_several_differ():
    (one,) = ParameterDrift().examine(run_of({n: [last(n)] for n in range(2)}))
    assert len(one.subjects) == 1
    several = {n: [digests("parameters", {1: [1, 1, n, n]})] for n in range(2)}
    (two,) = ParameterDrift().examine(run_of(several))
    assert len(two.subjects) == 2


def test_the_groups_of_equal_ranks():
    (finding,) = ParameterDrift().examine(run_of({n: [last(n == 2)] for n in range(4)}))
    assert finding.evidence["distinct_copies"] == "ranks 0-1,3 | rank 2"


def test_loaded_on_several_ranks():
    run = run_of({n: [*([load()] if n else []), last(n > 0)] for n in range(4)})
    (finding,) = ParameterDrift().examine(run)
    assert (finding.rule, finding.ranks) == ("load-on-some-ranks", (1, 2, 3))


@pytest.mark.parametrize("step", [0, 1])
def test_what_to_do_about_a_load_depends_on_when_it_comes(step):
    run = run_of({0: [load(step=step), last(True)], 1: [last(False)]})
    (finding,) = ParameterDrift().examine(run)
    assert finding.rule == "load-on-some-ranks"


@pytest.mark.parametrize(
    ("lines", "ranks", "line", "rule"),
    [
        ([[LINE, OTHER], [LINE]], (0,), 35, "load-on-some-ranks"),
        ([[LINE, LINE], [LINE]], (0,), 33, "load-on-some-ranks"),
        ([[LINE], [OTHER]], (0, 1), 33, "unequal-loads"),
        ([[LINE], [LINE]], (0, 1), 33, "unequal-loads"),
    ],
)
def test_the_load_that_only_some_ranks_make_is_blamed(lines, ranks, line, rule):
    loads = {n: [load(site=site) for site in sites] for n, sites in enumerate(lines)}
    run = run_of({n: [*mine, last(n > 0)] for n, mine in loads.items()})
    (finding,) = ParameterDrift().examine(run)
    assert (finding.rule, finding.ranks, finding.location.line) == (rule, ranks, line)


@pytest.mark.parametrize(
    ("own", "rule", "line"),
    [
        ((False, True), "restored-from-no-copy", 35),
        ((False, False), "load-on-some-ranks", 35),
        ((True, True), "load-on-some-ranks", 35),  # other weights were never loaded
        ((True,), "load-on-some-ranks", 33),
    ],
)
def test_weights_that_are_restored_from_no_copy(own, rule, line):
    loads = [
        msgspec.structs.replace(load(site=site), own=mine, at=at)
        for at, (site, mine) in enumerate(zip([LINE, OTHER], own, strict=False))
    ]
    (finding,) = ParameterDrift().examine(run_of({0: [*loads, last(True)], 1: [last(False)]}))
    assert (finding.rule, finding.ranks, finding.location.line) == (rule, (0,), line)


def test_a_state_that_is_no_copy():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    other = copy.deepcopy(net).state_dict()
    assert state_loading._is_own(net.state_dict(), net)
    assert state_loading._is_own(net[0].state_dict(), net)
    assert not state_loading._is_own(other, net)
    assert not state_loading._is_own({**net.state_dict(), "0.bias": other["0.bias"]}, net)
    assert not state_loading._is_own({}, net)


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        ([(), ("if rank == 0:",)], True),
        ([("if rank == 0:",), ()], True),
        ([("if averages is not None:",), ()], False),  # as on every rank, perhaps
        ([(), ()], False),
    ],
)
def test_a_load_from_averages_that_one_rank_alone_updates(heads, told):
    inside = [tuple(Statement(line=34, text=text) for text in place) for place in heads]
    update = (Place(OTHER, inside[0]), Place(STEP, inside[1]))
    loads = msgspec.structs.replace(load(step=1), update=update)
    (finding,) = ParameterDrift().examine(run_of({n: [loads, last(n > 0)] for n in range(2)}))
    assert (finding.rule, finding.location.line) == ("unequal-loads", 33)
    assert ([r.location.line for r in finding.related][:2] == [35, 34]) is told
    line = "another_line()" if inside[0] else "optimizer.step()"
    assert (f"run `{line}` on every rank" in finding.fix) is told


def test_the_module_whose_weights_are_loaded(monkeypatch):
    net, averages = (torch.nn.Linear(2, 2) for _ in range(2))
    holder = SimpleNamespace(averages=averages, both=torch.nn.ModuleList([net, averages]))
    sites = Sites(lambda event: None)
    monkeypatch.setattr(
        sites, "kind", lambda code: "user" if code.co_filename == __file__ else "own"
    )

    def of(state, *modules):
        recorder = SimpleNamespace(sites=sites)
        return state_loading._holder(state, net, sys._getframe(), recorder)

    assert holder and of(averages.state_dict(), averages) is averages
    assert of({k: v.clone() for k, v in averages.state_dict().items()}) is None
    assert of({}) is None


def test_a_rank_that_loads_later_than_another_looks_has_loaded():
    run = run_of({0: [load(), last(False)], 1: [edit(False), edit(False), load(), last(True)]})
    (finding,) = ParameterDrift().examine(run)
    assert finding.rule == "unequal-loads"


def test_gradients_that_follow_other_parameters():
    """Each rank scales its gradients by the norm of its parameters, which one of them edits."""

    def edit(kind, step, site=-1):
        return Edited(at=0, model=0, optimizer=0, kind=kind, step=step, changed=True, site=site)

    apart, later = {n: [1, 2, 3, 4] for n in range(4)}, {0: [1] * 4, 1: [1] * 4, 2: [1] * 4}
    ranks = {}
    for n in range(2):
        parameters = digests("parameters", {k: [*v[:3], 4 + n] for k, v in apart.items()})
        gradients = digests("gradients", {**later, 3: [1, 1, 1, 2 + n]})
        ranks[n] = [edit("gradients", 0, OTHER), parameters, gradients]
    ranks[0].append(edit("parameters", 0, LINE))
    report = diagnose(run_of(ranks), [GradientDrift(), ParameterDrift()])
    (finding,) = report.findings
    assert (finding.code, finding.location.line, finding.ranks) == ("DDP402", 33, (0,))
    assert [c.code for c in finding.consequences] == ["DDP401"]


def test_what_was_compared_is_told_as_that():
    rows = [{k: [1, 2, 3, 4 + n * (k > 4)] for k in range(24)} for n in range(2)]
    (finding,) = ParameterDrift().examine(
        run_of({n: [digests("parameters", rows[n], stride=4)] for n in range(2)}, count=24)
    )
    looks = [k for k in range(24) if 3 in chosen(k, 4, 4)]
    after = [k for k in looks if k > 4]
    assert finding.evidence["differing"] == "1 of 4 tensors"
    assert finding.evidence["last_equal_at_step"] == looks[-len(after) - 1]
    assert finding.steps == Steps(after[0], after[-1], len(after), compared=len(after))


def parts(n):
    """The state of a rank that holds every second parameter's."""
    return digests("state:momentum_buffer", {1: [7 * (i % 2 == n) for i in range(4)]})


def test_a_state_that_is_divided_between_the_ranks_is_no_other_one():
    gradients = equal("gradients")
    run = run_of({n: [gradients, equal("parameters"), parts(n)] for n in range(2)})
    assert not diagnose(run, [OptimizerStateDrift(), ParameterDrift()]).findings


def test_updates_that_are_not_exchanged_where_the_state_is_divided():
    rows = [{1: [1, 1, 1, 1], 2: [1, 1 + n, 1 + n, 1]} for n in range(2)]
    gradients = equal("gradients")
    run = run_of({n: [gradients, digests("parameters", rows[n]), parts(n)] for n in range(2)})
    (finding,) = diagnose(run, [OptimizerStateDrift(), ParameterDrift()]).findings
    assert (finding.code, finding.location.line) == ("DDP402", 40)
    assert finding.rule == "partial-optimizer-state"


@pytest.mark.parametrize("evaluations", [1, 4])
def test_an_optimizer_that_searches_by_the_loss_of_its_closure(evaluations):
    seen = OptimizerSeen(at=0, optimizer=0, kind="LBFGS", site=LINE, closure=True)
    done = StepDone(at=1, optimizer=0, step=0, site=LINE, wall_s=1, backwards=evaluations)
    rows = [{0: [1, 1, 1, 1], 1: [2 + n] * 4} for n in range(2)]
    state = [digests("state:H_diag", {1: [5 + n, 0, 0, 0]}) for n in range(2)]
    run = run_of(
        {n: [seen, done, equal("gradients"), digests("parameters", rows[n]), state[n]]
         for n in range(2)}
    )  # fmt: skip
    (finding,) = ParameterDrift().examine(run)
    assert finding.rule == ("rank-local-loss" if evaluations > 1 else "unknown-cause")


def own(step=LINE, writes=(), kind="Capped"):
    return OptimizerSeen(at=0, optimizer=0, kind=kind, site=OTHER, step_site=step, writes=writes)


TARGETS = {
    "the parameter": ((ParameterWrite(site=OTHER, target="p"),
                       ParameterWrite(site=STEP, target="self.head.weight")), 40),
    "another, too": ((ParameterWrite(site=OTHER, target="p"),
                      ParameterWrite(site=STEP, target="layer.weight")), 33),
    "one write": ((ParameterWrite(site=OTHER, target="p"),), 35),
    "none known": ((), 33),
}  # fmt: skip


def own_steps(*more, kinds=("parameters", "gradients"), seen=None, gradients=None):
    """Two ranks whose parameters part in step 0 of an optimizer of the program's own."""
    seen = seen or own()
    rows = {"parameters": (SAME, APART), "gradients": (gradients or SAME, SAME)}
    return run_of(
        {n: [seen, *(digests(k, rows[k][n]) for k in kinds), *(more if n else ())]
         for n in range(2)}
    )  # fmt: skip


@pytest.mark.parametrize("written", TARGETS)
def test_an_optimizer_of_the_programs_own_that_applies_different_updates(written):
    writes, line = TARGETS[written]
    (finding,) = ParameterDrift().examine(own_steps(seen=own(writes=writes)))
    assert (finding.rule, finding.location.line) == ("own-step", line)
    assert finding.ranks == (0, 1)
    assert "step 0 of Capped" in finding.cause
    assert "in head.weight only" in finding.cause


WRITTEN = Rewritten(at=0, model=0, optimizer=0, since=0, step=1, times=1, parameters=pack([0]))
OPTIONS = [
    Hyperparameters(at=0, optimizer=0, step=0, groups=({"lr": lr},)) for lr in (0.1, 0.2)
]  # fmt: skip
OTHERWISE = {
    "torch's own optimizer": {"seen": own(step=-1)},
    "gradients not compared": {"kinds": ("parameters",)},
    "other gradients differ": {"gradients": {**SAME, 0: [1, 2, 3, 5]}},
    "edits not watched": {
        "more": [ProbeTrouble(at=0, part="a.hook", error="TypeError()", lost=ManualEdits.lost)]
    },
    "parameters written outside": {"more": [WRITTEN]},
    "state differs": {"more": [digests("state:sum", {1: [7] * 4})]},
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_the_programs_own_optimizer_is_not_blamed(case):
    options = dict(OTHERWISE[case])
    run = own_steps(*options.pop("more", ()), **options)
    if case == "state differs":
        state = digests("state:sum", {1: [8] * 4})
        seen = [own(), digests("gradients", SAME)]
        run = run_of(
            {0: [*seen, digests("parameters", SAME), state],
             1: [*seen, digests("parameters", APART), *OTHERWISE[case]["more"]]}
        )  # fmt: skip
    assert "own-step" not in [f.rule for f in ParameterDrift().examine(run)]


def test_other_options_explain_it_before_the_programs_own_optimizer():
    run = run_of(
        {n: [own(), OPTIONS[n], digests("gradients", SAME),
             digests("parameters", APART if n else SAME)] for n in range(2)}
    )  # fmt: skip
    assert "own-step" not in [f.rule for f in ParameterDrift().examine(run)]


def test_steps_that_were_not_looked_at_may_be_at_fault():
    rows = [{0: SAME[0], 3: table[1]} for table in (SAME, APART)]
    run = run_of({n: [own(), equal("gradients"), digests("parameters", rows[n])] for n in range(2)})
    assert "own-step" not in [f.rule for f in ParameterDrift().examine(run)]


@pytest.mark.parametrize("lost", [HyperparameterWatch.lost, ManualEdits.lost, StateLoading.lost])
def test_what_was_not_observed_may_explain_it(lost):
    trouble = ProbeTrouble(at=0, part="a.hook", error="TypeError()", lost=lost)
    rows = [digests("parameters", SAME), digests("parameters", APART)]
    (finding,) = ParameterDrift().examine(run_of({0: [rows[0], trouble], 1: [rows[1]]}))
    assert finding.rule == "unknown-cause"
    assert trouble.watched is Watched(lost)


def test_clipping_does_not_edit_parameters():
    from ddpdoctor.analysis.replicas.manual_edits import _spot

    clip = Clipped(at=0, function="clip_grad_norm_", step=0, call=0, site=LINE)
    rank = run_of({n: [clip] for n in range(2)}).ranks[0]
    edits = [
        Edited(at=0, model=0, optimizer=0, kind=kind, step=0, changed=True)
        for kind in ("gradients", "parameters")
    ]
    assert [bool(_spot(rank, e, ["clip_grad_norm_"])) for e in edits] == [True, False]


def test_parameters_that_one_rank_edits_between_the_wrap_and_the_first_step():
    def edit(step, changed, site=-1):
        return Edited(
            at=0, model=0, optimizer=0, kind="parameters", step=step, changed=changed, site=site
        )

    apart = [digests("parameters", {k: [1, 2, 3, 4 + n] for k in range(4)}) for n in range(2)]
    before = [edit(0, True, LINE), edit(1, False)]
    (finding,) = ParameterDrift().examine(run_of({0: [apart[0]], 1: [*before, apart[1]]}))
    assert (finding.ranks, finding.location.line) == ((1,), 33)


def test_what_all_ranks_edited_while_they_were_equal_is_no_cause():
    """They load a checkpoint by hand after the wrap; later one of them edits its parameters."""

    def edit(step, changed, site=-1):
        return Edited(
            at=0, model=0, optimizer=0, kind="parameters", step=step, changed=changed, site=site
        )

    rows = [{k: [1, 2, 3, 4 + (n == 1 and k > 3)] for k in (0, 3, 6)} for n in range(3)]
    events = {n: [edit(0, True, OTHER), edit(1, False)] for n in range(3)}
    events[1] += [edit(4, True, LINE), edit(5, False)]
    tables = {n: [*events[n], digests("parameters", rows[n])] for n in range(3)}
    (finding,) = ParameterDrift().examine(run_of(tables, count=8))
    assert (finding.ranks, finding.location.line) == ((1,), 33)


def test_a_model_that_no_optimizer_holds():
    rows = {0: SAME, 1: {0: SAME[0], 1: APART[1], 4: APART[2]}}
    ranks = {n: [digests("parameters", rows[n], optimizer=UNHELD)] for n in range(2)}
    (finding,) = ParameterDrift().examine(run_of(ranks, optimizer=UNHELD))
    assert (finding.subjects, finding.location.line) == (("head.weight",), 10)
    assert OptimizerStateDrift().unobserved(run_of(ranks, optimizer=UNHELD))


def test_what_is_told_of_no_optimizer_is_not_taken_for_the_steps_of_one():
    ranks = {n: [equal("parameters")] for n in range(2)}
    ranks[0].append(digests("parameters", APART, optimizer=UNHELD))
    assert list(ParameterDrift().examine(run_of(ranks))) == []
