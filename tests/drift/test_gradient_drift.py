"""DDP401 on literal events."""

import msgspec
import pytest
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.numerics.nonfinite_origin import NonfiniteOrigin
from recordings import make_run
from replicas import LINE, OTHER, digests, equal, replica, run_of, sketch

from ddpdoctor.events import Clipped, Edited, NonFinite, Wrapped
from ddpdoctor.events.pack import pack

SAME = {0: [1, 2, 3, 4], 1: [5, 6, 7, 8], 2: [9, 8, 7, 6]}
APART = {0: [1, 2, 3, 4], 1: [50, 6, 7, 8], 2: [90, 8, 7, 6]}


def edit(ratio=0.0, changed=True, functions=(), site=-1, step=0, more=()):
    return Edited(
        at=0, model=0, optimizer=0, kind="gradients", step=step, changed=changed, ratio=ratio,
        functions=functions, site=site, more=more,
    )  # fmt: skip


def test_equal_gradients_are_left_alone():
    run = run_of({0: [equal("gradients")], 1: [equal("gradients")]})
    assert list(GradientDrift().examine(run)) == []
    assert GradientDrift().unobserved(run) is None


def test_gradients_that_were_not_averaged_are_not_judged():
    run = run_of({0: [digests("local", SAME)], 1: [digests("local", APART)]})
    assert list(GradientDrift().examine(run)) == []


def test_one_rank_that_clips_is_blamed():
    clip = Clipped(at=0, function="clip_grad_norm_", step=0, call=0, site=LINE)
    ranks = {
        0: [clip, edit(0.5, functions=("clip_grad_norm_",)), digests("gradients", APART)],
        1: [edit(changed=False), digests("gradients", SAME)],
        2: [edit(changed=False), digests("gradients", SAME)],
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.ranks == (0,)
    assert finding.location.line == 33
    assert (finding.steps.first, finding.subjects) == (1, ("body.weight",))


GONE = {0: [1, 2, 3, 4], 1: [5, 6, 0, 8], 2: [9, 8, 0, 6]}


@pytest.mark.parametrize(
    ("mine", "others", "line"),
    [
        (edit(site=LINE, more=(OTHER,)), edit(site=LINE), 35),
        (edit(site=LINE), edit(changed=False), 33),
        (edit(site=LINE), edit(0.5, functions=("clip_grad_norm_",)), 33),
        (edit(site=LINE), edit(site=LINE), 40),
        (edit(site=LINE), edit(), 40),
        (edit(), edit(changed=False), 40),
    ],
)
def test_a_gradient_that_one_rank_clears_is_not_an_edit_that_all_make(mine, others, line):
    run = run_of({0: [mine, digests("gradients", GONE)], 1: [others, digests("gradients", SAME)]})
    (finding,) = GradientDrift().examine(run)
    assert (finding.ranks, finding.location.line) == ((0,), line)
    assert finding.subjects == ("head.weight",)


def test_ranks_that_scale_in_different_steps():
    """Each by its own loss."""
    ranks = {
        0: [edit(0.5, site=LINE, step=1), edit(changed=False, step=2), digests("gradients", APART)],
        1: [edit(0.25, site=LINE, step=3), digests("gradients", SAME)],
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.ranks == (0,)
    assert "other ranks do so in other steps" in finding.cause
    assert "all-reduce it first" in finding.fix


def test_ranks_that_scale_differently_are_told_apart():
    ranks = {
        0: [edit(0.5), digests("gradients", SAME)],
        1: [edit(0.25), digests("gradients", APART)],
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.evidence["comparisons_that_differ"] == "2 of 2 since the first"


def test_what_every_rank_calls_blames_none():
    clip = Clipped(at=0, function="clip_grad_norm_", step=0, call=0, site=LINE)
    ranks = {
        0: [clip, edit(0.1, functions=("clip_grad_norm_", "unscale_")), digests("gradients", SAME)],
        1: [edit(0.5, functions=("unscale_",)), digests("gradients", APART)],
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.ranks == (0,)


def test_without_an_explanation_hardware_is_suspected():
    ranks = {n: [digests("gradients", APART if n == 1 else SAME)] for n in range(3)}
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.ranks == (1,)


def test_an_edit_that_all_ranks_make_alike_explains_nothing():
    ranks = {n: [edit(0.5), digests("gradients", APART if n else SAME)] for n in range(2)}
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.rule == "unknown-cause"


def test_parameters_that_are_averaged_again_mean_local_sgd():
    parted = [digests("parameters", {1: [1, 1, 1, n], 2: [2, 2, 2, 2]}) for n in range(2)]
    ranks = {n: [digests("gradients", APART if n else SAME), parted[n]] for n in range(2)}
    assert list(GradientDrift().examine(run_of(ranks))) == []


def test_drifting_parameters_follow_from_it():
    ranks = {
        n: [digests("gradients", APART if n else SAME),
            digests("parameters", {1: [1, 1, 1, 1], 2: [1, 1, 1, n]})]
        for n in range(2)
    }  # fmt: skip
    run = run_of(ranks)
    (cause,), (effect,) = GradientDrift().examine(run), ParameterDrift().examine(run)
    assert GradientDrift().explains(cause, effect)


def test_numbers_of_lines_are_a_ranks_own():
    def made_at(number, events):
        return [
            msgspec.structs.replace(
                e,
                parameters=tuple(msgspec.structs.replace(p, site=number) for p in e.parameters),
            )
            if isinstance(e, Wrapped)
            else e
            for e in events
        ]

    ranks = {
        n: made_at(n, [*replica(), digests("gradients", rows)])
        for n, rows in enumerate((SAME, APART))
    }
    (finding,) = GradientDrift().examine(make_run(ranks))
    assert finding.subjects == ("body.weight",)


def test_subjects_of_all_optimizers_of_a_model_are_named():
    def one(optimizer, rows):
        _, seen = replica(optimizer=optimizer)[-2:]
        half = msgspec.structs.replace(seen, parameters=pack([2 * optimizer, 2 * optimizer + 1]))
        return [half, digests("gradients", rows, optimizer=optimizer)]

    ranks = {}
    for n in range(2):
        halves = ({0: [1, 2 + n]}, {0: [3 + n, 4]})
        ranks[n] = [*replica()[:-1], *(e for i, rows in enumerate(halves) for e in one(i, rows))]
    (finding,) = GradientDrift().examine(make_run(ranks))
    assert finding.subjects == ("body.bias", "head.weight")


def clip_and(number, **more):
    """A rank that clips as all do, and one edit besides."""
    clip = Clipped(at=0, function="clip_grad_norm_", step=0, call=0, site=OTHER)
    event = msgspec.structs.replace(edit(0.1, functions=("clip_grad_norm_",)), **more)
    return [clip, event, digests("gradients", APART if number == 1 else SAME)]


def test_who_clips_as_all_do_and_edits_besides_is_blamed():
    ranks = {n: clip_and(n) for n in range(3)}
    ranks[1] = clip_and(1, ratio=0.05, beside=True, site=LINE)
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert (finding.ranks, finding.location.line) == ((1,), 33)
    ranks[1] = clip_and(1, ratio=0.05, beside=True)
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert (finding.ranks, finding.location.line) == ((1,), 40), "not where it is clipped"


def test_who_edits_at_a_line_more_than_all_do_is_blamed():
    ranks = {n: [edit(site=OTHER), digests("gradients", SAME)] for n in range(2)}
    ranks[1] = [edit(site=OTHER, more=(LINE,)), digests("gradients", APART)]
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert (finding.ranks, finding.location.line) == ((1,), 33)
    for nothing in ([], [edit(changed=False)]):
        ranks[0] = [*nothing, digests("gradients", SAME)]
        (finding,) = GradientDrift().examine(run_of(ranks))


def test_who_multiplies_by_another_number_than_most_is_blamed():
    ranks = {
        n: [edit(0.25 if n == 1 else 0.5), digests("gradients", APART if n == 1 else SAME)]
        for n in range(3)
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.ranks == (1,)


def test_small_factors_are_told_apart_at_the_step_where_they_differ():
    factors = {0: (0.0076046, 0.0073801), 1: (0.0076012, 0.0073801)}
    ranks = {
        n: [*(edit(f, step=i, site=LINE if i else -1) for i, f in enumerate(told)),
            digests("gradients", {0: APART[1] if n else SAME[1]})]
        for n, told in factors.items()
    }  # fmt: skip
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.location.line == 33, "it was followed at the next step"


@pytest.mark.parametrize(("mine", "line"), [(edit(site=LINE), 33), (edit(), 40)])
def test_gradients_that_one_rank_zeroes(mine, line):
    zeroed = {0: [1, 2, 3, 4], 1: [5, 1, 7, 8], 2: [9, 8, 7, 6]}
    events = {0: [digests("gradients", SAME)], 1: [mine, digests("gradients", zeroed)]}
    (finding,) = GradientDrift().examine(run_of(events))
    assert (finding.ranks, finding.location.line) == ((1,), line)


def test_gradients_that_are_zero_on_all_ranks_or_none_are_no_zeroing():
    zeros = {0: [1, 2, 3, 4], 1: [1, 6, 7, 8], 2: [9, 8, 7, 6]}
    ranks = {n: [digests("gradients", rows)] for n, rows in enumerate((SAME, APART, zeros))}
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.rule == "unknown-cause"


def test_no_claim_about_edits_that_were_not_looked_for():
    ranks = {n: [digests("gradients", APART if n else SAME)] for n in range(2)}
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.rule == "unknown-cause"


def test_the_size_that_is_known_is_that_of_the_parameters_at_the_end():
    parted = digests("parameters", {2: [1, 1, 1, 2], 3: [3, 3, 3, 4]})
    ranks = {
        n: [
            digests("gradients", APART if n else SAME),
            parted if n else digests("parameters", {2: [1, 1, 1, 7], 3: [3, 3, 3, 9]}),
            sketch(4, 1.0 + 0.5 * n),
        ]
        for n in range(2)
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.rule == "unknown-cause"
    (effect,) = ParameterDrift().examine(run_of(ranks))
    alike = {n: [*events[:-1], sketch(4, 1.0)] for n, events in ranks.items()}
    (effect,) = ParameterDrift().examine(run_of(alike))
    assert effect.rule == "unknown-cause"


@pytest.mark.parametrize(
    ("edits", "bad", "follows"),
    [
        ({1: edit(step=1)}, {1: {}}, True),
        ({1: edit(step=1)}, {0: {}, 1: {}}, False),
        ({0: edit(step=1)}, {1: {}}, False),
        ({}, {1: {}}, False),
        ({1: edit(step=1)}, {1: {"kind": "input"}}, False),
        ({1: edit(step=1)}, {1: {"names": ("head.bias",)}}, False),
        ({1: edit(step=1)}, {1: {"step": 1}}, False),
    ],
    ids=["it", "all have it", "another rank", "no edit", "an input", "another one", "before"],
)
def test_what_an_edit_made_not_finite_is_no_fault_of_its_own(edits, bad, follows):
    whole = {"kind": "parameter", "step": 2, "names": ("body.weight",), "gradients": True}
    ranks = {
        n: [digests("gradients", APART if n else SAME)]
        + ([edits[n]] if n in edits else [])
        + ([NonFinite(at=0, value="nan", site=-1, **whole | bad[n])] if n in bad else [])
        for n in range(2)
    }
    run = run_of(ranks)
    (drift,), (origin,) = GradientDrift().examine(run), NonfiniteOrigin().examine(run)
    assert GradientDrift().explains(drift, origin) is follows


def test_of_one_step_only_what_was_compared_in_it_counts():
    rows = [{k: [1, 2, 3, 4] if k != 5 or n else [6, 6, 6, 6] for k in range(9)} for n in range(2)]
    (finding,) = GradientDrift().examine(
        run_of({n: [digests("gradients", rows[n], stride=2)] for n in range(2)}, count=9)
    )
    assert finding.evidence["differing"] == "2 of 2 compared tensors (4 in all)"
    assert finding.evidence["comparisons_that_differ"] == "1 of 2 since the first"
    assert finding.evidence["last_equal_at_step"] == 4


def unscaled(ratio, **fields):
    changers = {"unscale_": LINE, **fields.pop("changers", {})}
    event = edit(ratio, functions=("clip_grad_norm_",))
    return msgspec.structs.replace(event, changers=changers, **fields)


def test_scales_that_are_taken_out_are_no_edit():
    ranks = {
        n: [unscaled(1 / scale), digests("gradients", APART if n else SAME)]
        for n, scale in enumerate((64.0, 128.0))
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.location.line == 33


@pytest.mark.parametrize(
    "fields",
    [{"beside": True}, {"changers": {"clip_grad_norm_": LINE}}],
    ids=["by hand", "clipped"],
)
def test_what_is_done_beside_taking_the_scale_out_is_an_edit(fields):
    ranks = {
        n: [unscaled(1 / (n + 2), **fields), digests("gradients", APART if n else SAME)]
        for n in (0, 1)
    }
    (finding,) = GradientDrift().examine(run_of(ranks))
    assert finding.rule == "unequal-edits"
