"""DDP309: lists of parameters compared by position."""

import msgspec
import pytest
from ddpdoctor.checks.model.model_mismatch import ModelMismatch
from recordings import make_run, steps
from wraps import codes, group, parameters, rank, sites, wrap

from ddpdoctor.events import Unwrapped, UnwrappedState

CHECK = ModelMismatch()


def find(*wraps):
    count = len(wraps)
    ranks = {r: rank(wrapped=w, ranks=range(count)) for r, w in enumerate(wraps)}
    return list(CHECK.examine(make_run(ranks)))


def test_the_same_layers_in_another_order():
    (found,) = find(wrap(("body", "head", "aux")), wrap(("body", "aux", "head")))
    assert found.ranks == (0, 1)
    assert "another order" in found.cause
    assert found.location.line == 12  # the layer that stands there on rank 1
    assert found.evidence["parameters"][0]["position"] == 2


def test_the_odd_rank_of_three():
    (found,) = find(wrap(), wrap(), wrap(("body", "head")))
    assert found.ranks == (2,)
    assert "absent" in found.summary


def test_other_shapes():
    bigger = [msgspec.structs.replace(p, shape=(9, 9)) for p in parameters()[2:3]]
    (found,) = find(wrap(), wrap(listed=(*parameters()[:2], *bigger, *parameters()[3:])))
    assert "shape 4x4 against 9x9" in found.label
    assert "shapes" in found.cause
    assert "counted" in found.fix
    assert found.location.line == 11


def test_frozen_here_and_trained_there():
    (found,) = find(wrap(), wrap(listed=parameters(frozen=("body",))))
    assert found.label.endswith("frozen on rank 1, trained on rank 0")
    assert "freeze" in found.fix


def test_another_dtype():
    double = tuple(msgspec.structs.replace(p, dtype="float64") for p in parameters())
    (found,) = find(wrap(), wrap(listed=double))
    assert "dtypes" in found.cause
    assert "model.to(dtype)" in found.fix


@pytest.mark.parametrize(
    ("layers", "fix"),
    [(("body", "aux", "head"), "sorted(names)"), (("body", "head"), "branches")],
)
def test_the_help_fits_what_differs(layers, fix):
    (found,) = find(wrap(), wrap(layers))
    assert fix in found.fix


def test_gloo_aborts_of_what_does_not_fit():
    (found,) = find(wrap(), wrap(listed=parameters()[:-1]))
    for subject, explained in (("SIGABRT", True), ("SIGKILL", False)):
        died = msgspec.structs.replace(found, check="rank-died", subjects=(subject,))
        assert CHECK.explains(found, died) is explained


def test_equal_models():
    assert find(wrap(), wrap()) == []


def test_what_ddp_was_told_to_ignore_may_differ():
    ignoring = wrap(listed=parameters(ignored=("aux",)))
    assert find(ignoring, wrap(("body", "head"))) == []


def test_models_of_different_groups():
    first = [*sites(), group((0, 1)), group((0,), 1, "a"), wrap(group=1)]
    second = [*sites(), group((0, 1)), group((1,), 1, "b"), wrap(("body",), group=1)]
    assert codes(make_run({0: first, 1: second}), CHECK) == []


def test_a_rank_that_did_not_get_to_its_second_wrap():
    second = wrap(("body",), model=1)
    run = make_run({0: rank(second), 1: rank()})
    assert codes(run, CHECK) == []


def test_gradients_that_are_reduced_by_hand():
    def by_hand(layers, exchanged):
        seen = Unwrapped(at=0, optimizer=0, kind="Net", parameters=parameters(layers))
        state = UnwrappedState(
            at=0, optimizer=0, step=0, gradients=1, parameters=1, exchanged=exchanged
        )
        return [*sites(), group((0, 1)), seen, state, *steps(3)]

    orders = ("body", "head"), ("head", "body")
    mixed = make_run({r: by_hand(o, "gradients") for r, o in enumerate(orders)})
    (found,) = CHECK.examine(mixed)
    assert (found.severity.value, "DDP" in found.cause) == ("error", False)
    assert "matched by the order of their calls" in found.cause
    stages = make_run({r: by_hand(o, "point-to-point") for r, o in enumerate(orders)})
    assert codes(stages, CHECK) == []
    grown = [*by_hand(("head",), "gradients"), *by_hand(("head", "body"), "gradients")]
    assert codes(make_run({0: grown, 1: grown}), CHECK) == [], "a group was added on every rank"
    other = [*by_hand(("head",), "gradients"), *by_hand(("head", "neck"), "gradients")]
    assert codes(make_run({0: grown, 1: other}), CHECK) == ["DDP309 error"]
