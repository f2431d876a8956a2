"""model-not-wrapped: ranks that may be meant to train models of their own."""

import pytest
from ddpdoctor.checks.model.model_not_wrapped import ModelNotWrapped
from msgspec.structs import replace
from readers import loader
from recordings import make_run, site, steps
from wraps import group, parameters

from ddpdoctor.events import (
    FileWritten,
    Hyperparameters,
    LoaderSeen,
    StepDone,
    Unwrapped,
    UnwrappedState,
)

CHECK = ModelNotWrapped()


def own(rank, *, begin=7, lr=0.01, layers=("body", "head"), optimizer=0, sent=0, **fields):
    """A model that the rank trains alone: what it begins with, and its learning rate."""
    which = {"at": 0, "optimizer": optimizer}
    options = {"lr": lr, "betas": "0.9, 0.99", "fused": False}
    return [
        Unwrapped(kind="Net", parameters=parameters(layers), **which, **{"site": 1, **fields}),
        Hyperparameters(step=0, groups=(options,), **which),
        *(
            UnwrappedState(
                step=n,
                gradients=10 * n + rank,
                parameters=begin + 100 * n + rank * (n > 0),
                averaged=sent,
                **which,
            )
            for n in range(3)
        ),
        *steps(9, optimizer=optimizer),
    ]


def told_of(*ranks, beside=()):
    made = [group((0, 1)), site(1, "train.py", 3, "net = Net()"), *beside]
    return list(CHECK.examine(make_run({r: [*made, *own] for r, own in enumerate(ranks)})))


DEALT = LoaderSeen(
    at=0, loader=0, site=-1, loop_site=-1, dataset="Images", length=8, sampler="DistributedSampler",
    distributed=True, replicas=2, sampler_rank=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("begins", "beside", "fields", "confidence"),
    [
        pytest.param((7, 8), (), {}, "suspected", id="an ensemble"),
        pytest.param((7, 7), (), {}, "proven", id="copies"),
        pytest.param((7, 8), (DEALT,), {}, "proven", id="shares of the data"),
        pytest.param((7, 8), (), {"wrapped": 1}, "proven", id="beside a wrapped model"),
    ],
)
def test_ranks_that_begin_with_values_of_their_own(begins, beside, fields, confidence):
    (found,) = told_of(*(own(r, begin=b, **fields) for r, b in enumerate(begins)), beside=beside)
    severity = "error" if confidence == "proven" else "note"
    assert (found.severity.value, found.confidence.value) == (severity, confidence)


@pytest.mark.parametrize(
    ("begins", "shared", "exchanged", "confidence"),
    [
        pytest.param((7, 8), (5, 5), "gradients", "suspected", id="a part of its own"),
        pytest.param((7, 7), (5, 5), "gradients", "proven", id="forgotten"),
        pytest.param((7, 8), (5, 6), "gradients", "proven", id="both start apart"),
        pytest.param((7, 8), (5, 5), "", "proven", id="nothing is synchronised"),
    ],
)
def test_a_part_beside_one_that_is_synchronised(begins, shared, exchanged, confidence):
    def ranks():
        for r in (0, 1):
            other = UnwrappedState(
                at=0, optimizer=1, step=0, gradients=3, parameters=shared[r], exchanged=exchanged
            )
            trunk = Unwrapped(
                at=0, optimizer=1, kind="Trunk", parameters=parameters(("trunk",)), site=1
            )
            yield [*own(r, begin=begins[r]), trunk, other, *steps(9, optimizer=1)]

    found = [f for f in told_of(*ranks(), beside=(DEALT,)) if 0 in f.optimizers]
    assert [f.confidence.value for f in found] == [confidence]
    assert ("another part" in found[0].cause) is (confidence == "suspected")


@pytest.mark.parametrize(
    ("paths", "step", "wrapped", "confidence"),
    [
        pytest.param(("head-0.pt", "head-1.pt"), 8, 1, "suspected", id="a file of each rank"),
        pytest.param(("head-0.pt", "head-1.pt"), 8, 0, "proven", id="nothing is synchronised"),
        pytest.param(("head-0.pt", "head-1.pt"), 0, 1, "proven", id="before the training"),
        pytest.param(("head.pt", "head.pt"), 8, 1, "proven", id="one file"),
        pytest.param(("head.pt", None), 8, 1, "proven", id="of one rank"),
    ],
)
def test_a_part_that_every_rank_saves_for_itself(paths, step, wrapped, confidence):
    def saved(path):
        return [FileWritten(at=9, path=path, site=1, how="save", step=step)] * bool(path)

    ranks = ([*own(r, wrapped=wrapped), *saved(path)] for r, path in enumerate(paths))
    (found,) = told_of(*ranks)
    assert found.confidence.value == confidence


def fold(rank, left_out, sampler=None):
    """A rank that reads 40 samples but for some."""
    read = [i for i in range(40) if i % 4 != left_out]
    return loader(1, [read] * 2, length=40, **(sampler or {}))


@pytest.mark.parametrize(
    ("left_out", "confidence"),
    [
        pytest.param((0, 1), "suspected", id="another fold on each rank"),
        pytest.param((0, 0), "proven", id="the same on all ranks"),
        pytest.param((9, 9), "proven", id="everything"),
    ],
)
def test_ranks_that_each_leave_out_a_fold(left_out, confidence):
    (found,) = told_of(*([*own(r), *fold(r, n)] for r, n in enumerate(left_out)))
    assert found.confidence.value == confidence


def test_shares_that_a_sampler_shuffles_anew_are_no_folds():
    def rank(r):
        epochs = [[i for i in range(40) if i % 4 != r], [i for i in range(40) if i % 4 != 2 + r]]
        shared = {"distributed": True, "replicas": 2, "sampler_rank": r}
        return [*own(r), *loader(1, epochs, length=40, **(shared if r < 2 else {}))]

    (found,) = told_of(rank(0), rank(1))
    assert found.confidence.value == "proven"


def test_a_sampler_that_feeds_another_model_only():
    def ranks(sampler_first):
        for r in (0, 1):
            shared = {"distributed": True, "replicas": 2, "sampler_rank": r}
            begun = [replace(e, at=50) for e in fold(r, 9, shared)]
            rest = [e for e in begun if not isinstance(e, StepDone)]
            yield [*own(r, begin=7 + r), *(fold(r, 9, shared) if sampler_first else rest)]

    (apart,), (fed,) = told_of(*ranks(False)), told_of(*ranks(True))
    assert (apart.confidence.value, fed.confidence.value) == ("suspected", "proven")


@pytest.mark.parametrize(("each", "confidence"), [(64, "suspected"), (2, "proven")])
def test_parts_of_one_model_that_exchange_activations(each, confidence):
    def rank(r):
        for event in own(r, begin=7 + r, wrapped=1):
            states = isinstance(event, UnwrappedState)
            yield replace(event, elements=each * event.step) if states else event

    (found,) = told_of(*([*rank(r)] for r in (0, 1)))
    assert found.confidence.value == confidence


def test_values_that_were_sent_before_the_first_step_are_of_one_model():
    (found,) = told_of(*(own(r, begin=7 + r, sent=1) for r in (0, 1)))
    assert found.confidence.value == "proven"


@pytest.mark.parametrize(("count", "wrapped", "told"), [(3, 1, 0), (2, 1, 1), (3, 0, 1)])
def test_copies_of_a_wrapped_model_that_are_adapted_and_dropped(count, wrapped, told):
    ranks = [
        [e for n in range(count) for e in own(r, optimizer=n, wrapped=wrapped)] for r in (0, 1)
    ]
    assert len(told_of(*ranks)) == told


@pytest.mark.parametrize("beside", [(), (DEALT,)])
def test_a_search_over_options(beside):
    (*found,) = told_of(own(0, lr=0.01), own(1, lr=0.1), beside=beside)
    assert [f.code for f in found] == ["DDP305"] * len(beside)
    assert told_of(own(0, lr=0.1), own(1, lr=0.1 * (1 + 1e-7))), "rounded on the way"


@pytest.mark.parametrize(("line", "silent"), [(1, True), (2, False)])
def test_a_search_in_which_some_trials_happen_to_agree(line, silent):
    """The first trials have other shapes; of another line, that says nothing of these."""

    def trials(rank):
        first = own(rank, layers=(("body",), ("body", "head"))[rank], site=line)
        return [*first, *own(rank, optimizer=1)]

    other = site(2, "train.py", 4, "part = Part()")
    assert bool(told_of(trials(0), trials(1), beside=(other,))) is not silent
