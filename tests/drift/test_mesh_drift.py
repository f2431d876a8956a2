"""DDP402 and DDP502 of models of DTensors on a mesh, on literal events."""

import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from replicas import LINE, run_of

from ddpdoctor.analysis.data.split_layers import data_parallel, of_one_replica
from ddpdoctor.events import GroupReady, MeshDigests, MeshModel, Tensor, Unwrapped, UnwrappedState
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Confidence, Severity


def model(*, dims=("dp", "tp"), placed=("-s", "--"), split=("tp",), parted=False):
    """By default a layer that is split over tp, and a plain tensor."""
    names = tuple(f"p{n}" for n in range(len(placed)))
    return MeshModel(
        at=0, optimizer=0, kind="Net", site=LINE, dims=dims, sizes=(2, 2), ranks=(0, 1, 2, 3),
        names=names, shapes=((2,),) * len(placed), placed=placed, split=split, parted=parted,
        step_site=LINE,
    )  # fmt: skip


def look(step, gradients, values, samples=()):
    fields = {"at": step, "optimizer": 0, "step": step, "samples": samples}
    return MeshDigests(**fields, gradients=pack(gradients), values=pack(values))


def made(*looks, **about):
    """A run of four ranks: for each look the step and, by rank, gradients and values."""
    ranks = {r: [model(**about)] for r in range(4)}
    for step, rows in looks:
        for rank, row in enumerate(rows):
            ranks[rank].append(look(step, *row))
    return run_of(ranks)


def judged(*looks, **about):
    return list(ParameterDrift().examine(made(*looks, **about)))


START = (0, [([5, 7], [20, 30]), ([6, 7], [21, 30])] * 2)
"""Ranks 0 and 2 hold one half of the layer, 1 and 3 the other; averaged over dp."""
NEXT = (1, [([8, 9], [22, 32]), ([4, 9], [23, 32])] * 2)


def test_silent():
    assert judged(START, NEXT) == []
    assert judged(START) == []


def test_gradients_that_nothing_averages_over_a_dimension():
    start = (0, [([5 + r, 7 + r // 2], START[1][r][1]) for r in range(4)])
    later = (1, [([9, 8], [20 + r, 32 + r // 2]) for r in range(4)])
    (found,) = judged(start, later)
    assert (found.rule, found.severity) == ("apart-on-mesh", Severity.ERROR)
    assert found.ranks == (0, 1, 2, 3)
    assert found.subjects == ("p0", "p1")
    assert "mesh dimension dp (ranks 0 and 2, ranks 1 and 3) since step 1" in found.summary
    assert 'mesh["dp"].get_group()' in found.fix


def test_a_plain_tensor_beside_layers_that_are_split():
    start = (0, [([5, 7], [20, 30]), ([6, 8], [21, 30])] * 2)
    later = (1, [([8, 9], [22, 32]), ([4, 9], [23, 33])] * 2)
    (found,) = judged(start, later)
    assert found.subjects == ("p1",)
    assert "dimension tp" in found.summary
    assert "SequenceParallel" in found.fix


def test_a_model_made_from_other_values_where_gradients_agree():
    start = (0, [([5, 7], [20 + r, 30]) for r in range(4)])
    later = (1, [([8, 9], [24 + r, 32]) for r in range(4)])
    (found,) = judged(start, later)
    assert found.subjects == ("p0",)
    assert "different values" in found.cause
    assert "seed" in found.fix


def test_a_replica_that_is_written_on_one_rank():
    placed = ("rs",)
    rows = [([5], [20]), ([6], [21])] * 2
    edited = [*rows[:2], ([5], [99]), rows[3]]
    about = {"dims": ("replicate", "shard"), "placed": placed, "split": ()}
    (found,) = judged((0, rows), (1, rows), (2, edited), **about)
    assert "replicate (ranks 0 and 2) since step 2" in found.summary
    assert found.ranks == (0, 2)


def test_stages_and_experts_are_no_copies():
    start = (0, [([5 + r], [20]) for r in range(4)])
    later = (1, [([9 + r], [30 + r]) for r in range(4)])
    about = {"dims": ("a", "b"), "placed": ("--",), "split": ()}
    assert judged(start, later, **about, parted=True) == []
    # The names say nothing, and nothing was averaged: it may be meant.
    found = judged(start, later, **about)
    assert {f.severity for f in found} == {Severity.WARNING}
    assert {f.confidence for f in found} == {Confidence.SUSPECTED}
    # Each rank made its own, and gradients differ, too: other models.
    assert judged((0, [([5 + r], [20 + r]) for r in range(4)]), later, **about) == []


def test_rounding_errors_are_a_note():
    rows = [([5, 7], [20, 30], ((1.0,), (1.0,))), ([6, 8], [21, 30], ((1.0,), (1.0,)))] * 2
    later = [([8, 9], [22, 32], ((1.0,), (1.0,))), ([4, 8], [23, 33], ((1.0,), (1.00001,)))] * 2
    (found,) = judged((0, rows), (1, later))
    assert found.severity is Severity.NOTE


def split(*values, exchanged="in backward", partners=True, names=("wq", "norm.w", "emb.w")):
    """Two ranks that split `wq` between them; values of the other parameters by look and rank."""
    ranks = {}
    for r in range(2):
        tensors = tuple(Tensor(name=n, shape=(4,), dtype="float32") for n in names)
        ranks[r] = [
            GroupReady(at=0, group=0, name="", ranks=(0, 1), member=True, backend="gloo", site=-1),
            Unwrapped(at=0, optimizer=0, kind="Net", parameters=tensors, site=LINE),
        ]
        for step, look in enumerate(values):
            each = [7 + step + r, *look[0][r], 50 + step + r, *look[1][r]]
            ranks[r].append(
                UnwrappedState(
                    at=step, optimizer=0, step=step, gradients=0, parameters=0,
                    exchanged=exchanged, partners=(1 - r,) if partners else (), each=pack(each),
                )
            )  # fmt: skip
    return run_of(ranks)


def by_hand(*values, **about):
    found = ParameterDrift().examine(split(*values, **about))
    return [f for f in found if f.rule == "apart-on-mesh"]


SAME = ([(3, 4), (3, 4)], [(30, 40), (30, 40)])
PARTED = ([(5, 6), (9, 6)], [(33, 44), (34, 44)])
OWN = ([(3, 4), (8, 4)], [(30, 40), (30, 40)])


def test_a_model_that_the_program_splits_over_a_group():
    (found,) = by_hand(OWN, PARTED)
    assert found.subjects == ("norm.w",)
    assert found.ranks == (0, 1)
    assert "sum these gradients" in found.fix
    assert by_hand(SAME, SAME) == []
    # These do not exchange activations; each trains a model of its own.
    assert by_hand(OWN, PARTED, exchanged="gradients") == []
    assert by_hand(OWN, PARTED, partners=False) == []


def test_ranks_that_work_on_one_replica_together_divide_no_data():
    both = frozenset({0, 1})
    assert of_one_replica(split(OWN, PARTED), both) == [frozenset({0}), frozenset({1})]
    assert of_one_replica(split(SAME, SAME, exchanged="gradients"), both) == [both]


def test_stages_of_a_pipeline_divide_no_data():
    stages = {
        r: [Unwrapped(at=0, optimizer=0, kind="Stage", site=LINE,
                      parameters=(Tensor(name="w", shape=(4, 4 + r), dtype="float32"),))]
        for r in range(2)
    }  # fmt: skip
    assert len(of_one_replica(run_of(stages), frozenset({0, 1}))) == 2


def test_the_bias_of_a_layer_that_is_split_is_split_as_well():
    assert by_hand(OWN, PARTED, names=("wq.weight", "wq.bias", "emb.w")) == []


@pytest.mark.parametrize(
    ("dims", "sets"),
    [
        (("dp", "tp"), [{0, 2}, {1, 3}]),
        (("replicate", "tp"), [{0, 2}, {1, 3}]),
        (("cp", "tp"), []),
        (("pp", "tp"), []),
        (("dp_sp", "tp"), []),
    ],
)
def test_ranks_that_divide_the_data(dims, sets):
    run = made(START, NEXT, dims=dims)
    assert data_parallel(run) == [frozenset(s) for s in sets]
    assert data_parallel(made(START, NEXT, dims=("dp", "x"), split=())) is None
