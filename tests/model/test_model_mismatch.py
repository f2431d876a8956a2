"""DDP309: lists of parameters compared by position."""

import msgspec
import pytest
from ddpdoctor.checks.model.model_mismatch import ModelMismatch
from recordings import make_run, site, steps
from wraps import codes, group, parameters, rank, sites, wrap

from ddpdoctor.events import (
    CallSite,
    OptimizerSeen,
    Place,
    Submodule,
    Tensor,
    Unwrapped,
    UnwrappedState,
)
from ddpdoctor.events.pack import pack

CHECK = ModelMismatch()


def find(*wraps):
    count = len(wraps)
    ranks = {r: rank(wrapped=w, ranks=range(count)) for r, w in enumerate(wraps)}
    return list(CHECK.examine(make_run(ranks)))


def test_the_same_layers_in_another_order():
    (found,) = find(wrap(("body", "head", "aux")), wrap(("body", "aux", "head")))
    assert found.ranks == (0, 1)
    assert found.location.line == 12  # the layer that stands there on rank 1
    assert found.evidence["parameters"][0]["position"] == 2


def test_the_odd_rank_of_three():
    (found,) = find(wrap(), wrap(), wrap(("body", "head")))
    assert found.ranks == (2,)


def test_other_shapes():
    bigger = [msgspec.structs.replace(p, shape=(9, 9)) for p in parameters()[2:3]]
    (found,) = find(wrap(), wrap(listed=(*parameters()[:2], *bigger, *parameters()[3:])))
    assert found.location.line == 11


def test_frozen_here_and_trained_there():
    (found,) = find(wrap(), wrap(listed=parameters(frozen=("body",))))
    assert found.rule == "frozen-on-some-ranks"


def test_another_dtype():
    double = tuple(msgspec.structs.replace(p, dtype="float64") for p in parameters())
    (found,) = find(wrap(), wrap(listed=double))
    assert found.rule == "different-dtypes"


@pytest.mark.parametrize(
    ("layers", "rule"),
    [(("body", "aux", "head"), "parameter-order"), (("body", "head"), "different-names")],
)
def test_the_help_fits_what_differs(layers, rule):
    (found,) = find(wrap(), wrap(layers))
    assert found.rule == rule


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
    assert (found.severity.value, found.rule) == ("error", "parameter-order")
    stages = make_run({r: by_hand(o, "point-to-point") for r, o in enumerate(orders)})
    assert codes(stages, CHECK) == []
    grown = [*by_hand(("head",), "gradients"), *by_hand(("head", "body"), "gradients")]
    assert codes(make_run({0: grown, 1: grown}), CHECK) == [], "a group was added on every rank"
    other = [*by_hand(("head",), "gradients"), *by_hand(("head", "neck"), "gradients")]
    assert codes(make_run({0: grown, 1: other}), CHECK) == ["DDP309 error"]
    shares = (("body",), ("head",))
    zero = make_run({r: by_hand(share, "gradients") for r, share in enumerate(shares)})
    assert codes(zero, CHECK) == [], "each rank's optimizer holds a share of the parameters"


@pytest.mark.parametrize(
    ("other", "rule"),
    [([2, 3, 0, 1], "optimizer-order"), ([0, 1, 2, 3], "parameter-order"), ([], "parameter-order")],
)
def test_an_optimizer_that_has_the_parameters_of_equal_models_in_another_order(other, rule):
    def events(layers, places):
        seen = Unwrapped(
            at=0, optimizer=0, kind="Net", parameters=parameters(layers), places=pack(places)
        )
        state = UnwrappedState(
            at=0, optimizer=0, step=0, gradients=1, parameters=1, exchanged="gradients"
        )
        made = OptimizerSeen(at=0, optimizer=0, kind="Muon", site=11)
        return [*sites(), group((0, 1)), made, seen, state, *steps(3)]

    orders = {0: events(("body", "head"), [0, 1, 2, 3]), 1: events(("head", "body"), other)}
    (found,) = CHECK.examine(make_run(orders))
    assert found.rule == rule
    assert found.summary.startswith("Muon has") is (rule == "optimizer-order")


MAKERS = {"actor": 60, "critic": 61, "judge": 62}


def wrap_each(names, sizes, *, comprehension=True, group=0):
    """A rank that wraps models in that order, each from a function of its own."""
    text = "nets = {n: DDP(PARTS[n]()) for n in names}" if comprehension else "nets[n] = DDP(made)"
    events = [site(at, "nets.py", at, "return nn.Linear(...)", name) for name, at in MAKERS.items()]
    events.append(site(70, "train.py", 70, text))
    events.append(CallSite(at=0, id=1, places=(Place(70),)))
    for number, name in enumerate(names):
        size = sizes[name]
        listed = [Tensor("weight", (size, size), "float32"), Tensor("bias", (size,), "float32")]
        made = Submodule("", "Linear", MAKERS[name])
        wrapped = wrap(model=number, kind="Linear", group=group, listed=tuple(listed))
        events.append(msgspec.structs.replace(wrapped, site=70, modules=(made,)))
    return events


def in_orders(*orders, sizes=None, **more):
    """Ranks that wrap such models, in one group."""
    sizes = sizes or {"actor": 4, "critic": 8, "judge": 16}
    ranks = tuple(range(len(orders)))
    return list(
        CHECK.examine(
            make_run(
                {r: [group(ranks), *wrap_each(o, sizes, **more)] for r, o in enumerate(orders)}
            )
        )
    )


def test_models_wrapped_in_another_order():
    (found,) = in_orders(("actor", "judge", "critic"), ("actor", "critic", "judge"))
    assert (found.location.file, found.location.line, found.ranks) == ("train.py", 70, (0, 1))
    assert [r.location.line for r in found.related] == [62, 61]
    assert found.rule == "wrap-order"


@pytest.mark.parametrize(
    ("comprehension", "line", "rule"),
    [(True, 70, "wrap-loop"), (False, 60, "different-branches")],
)
def test_other_models_of_which_nothing_more_is_seen(comprehension, line, rule):
    (found,) = in_orders(("critic",), ("actor",), comprehension=comprehension)
    assert (found.location.line, found.rule) == (line, rule)


def test_models_of_equal_shapes_in_another_order_are_mixed_in_silence():
    same = {"actor": 4, "critic": 4}
    (found,) = in_orders(("actor", "critic"), ("critic", "actor"), sizes=same)
    assert found.evidence["differences"] == "0 of 2 parameters"
    for orders in (
        (("actor", "critic"), ("actor", "critic")),
        (("actor",), ("critic",)),  # loaded here, made there
        (("actor", "actor"), ("critic", "critic")),
    ):
        assert in_orders(*orders, sizes=same) == []


def test_one_line_makes_all_models():
    """Of a size counted from data nothing else can be told."""
    (found,) = find(wrap(), wrap(listed=parameters()[:2]))
    assert found.rule == "different-names"


def test_models_of_equal_shapes_wrapped_for_groups_of_their_own():
    orders = (("actor", 0), ("critic", 1)), (("critic", 1), ("actor", 0))
    ranks = {}
    for rank_number, order in enumerate(orders):
        events = [group((0, 1), n, name) for n, name in enumerate("ab")]
        for model, (name, number) in enumerate(order):
            *lines, wrapped = wrap_each((name,), {name: 4}, group=number)
            events += [*lines, msgspec.structs.replace(wrapped, model=model)]
        ranks[rank_number] = events
    assert codes(make_run(ranks), CHECK) == []
