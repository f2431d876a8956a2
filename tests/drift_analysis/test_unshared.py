"""DDP402 without a wrapper, on literal events: copies that the exchange cannot keep equal."""

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import make_run, site, steps
from wraps import group, parameters

from ddpdoctor.events import (
    AbsentGradients,
    Averaged,
    Loaded,
    Place,
    Statement,
    Unwrapped,
    UnwrappedState,
)
from ddpdoctor.events.pack import pack, unpack

LAYERS = ("body", "head")
"""`body.weight`, `body.bias`, `head.weight`, `head.bias`."""


def states(rank, *, local=(), apart=(), clipped=False, by_torch=False, handed=(), other=0, count=4):
    """Looks before steps 0, 1, 2 and 4. Of the parameters at `local`, gradients differ and so do
    the values after the first step; those at `apart` always differ. Where they are clipped by a
    norm that differs, all gradients do, and if by torch, all values."""
    for step in (0, 1, 2, 4):
        own = 1000 * (rank + 1)
        before = [10 * step + i + 2 + (own if i in local else 0) for i in range(count)]
        gradients = [g + own if clipped and i not in local else g for i, g in enumerate(before)]
        drifted = {*apart, *((range(count) if by_torch else local) if step else ())}
        values = [100 * step + i + 2 + (own if i in drifted else 0) for i in range(count)]
        yield UnwrappedState(
            at=0,
            optimizer=0,
            step=step,
            gradients=sum(gradients),
            parameters=sum(values),
            exchanged="gradients",
            complete=not local,
            completed=0 if local else step,
            shared=step + 1,
            each=pack([*gradients, *values]),
            handed=pack(handed),
            other=other,
            exchange_site=3,
            unclipped=pack(before) if by_torch else "",
            clip_site=4 if by_torch else -1,
        )


def found_in(ranks=(0, 1), change=None, layers=LAYERS, spread=-1, **kwargs):
    rows = {rank: list(states(rank, **kwargs)) for rank in ranks}
    for told in rows.values() if change is not None else ():
        told[-1] = msgspec.structs.replace(told[-1], **change)
    for told in rows.values():
        told[0] = msgspec.structs.replace(told[0], spread=spread)
    return found_with(rows, layers)


def run_with(rows, layers=LAYERS):
    made = [site(1, "train.py", 3, "net = Net()"), site(2, "train.py", 9, "optimizer.step()"),
            site(3, "train.py", 8, "dist.all_reduce(flat)"),
            site(4, "train.py", 9, "clip_grad_norm_(net.parameters(), 1)")]  # fmt: skip
    event = Unwrapped(
        at=0, optimizer=0, kind="Net", site=1, step_site=2, parameters=parameters(layers)
    )
    return make_run(
        {r: [*made, group(tuple(rows)), event, *told, *steps(8)] for r, told in rows.items()}
    )


def found_with(rows, layers=LAYERS):
    run = run_with(rows, layers)
    check = ParameterDrift()
    told = list(check.examine(run))
    assert not told or check.unobserved(run) is None
    return told


def test_biases_that_flat_buffers_leave_out():
    (found,) = found_in(local=(1, 3), other=16)
    assert found.severity.value == "error"
    assert (found.subjects, found.ranks) == (("body.bias", "head.bias"), (0, 1))
    assert (found.location.line, found.steps.first) == (8, 1)


def test_clipping_by_a_norm_that_differs_makes_all_of_them_drift():
    (found,) = found_in(local=(1, 3), clipped=True, handed=(0, 2))
    assert found.subjects == ("body.bias", "head.bias")
    assert found_in(local=(1, 3), clipped=True, other=16) == [], "which ones is not known"


def test_clipping_by_torch_shows_which_gradients_were_synchronised():
    (found,) = found_in(local=(2, 3), clipped=True, by_torch=True, other=16)
    assert (found.rule, found.severity.value) == ("never-synced", "error")
    assert found.subjects == ("head.weight", "head.bias")
    assert (found.location.line, found.related[-1].location.line) == (8, 9)


def test_clipping_by_torch_of_local_layers_that_changes_nothing_else():
    (found,) = found_in(local=(2, 3), by_torch=False, other=16)
    assert (found.severity.value, len(found.related)) == ("note", 1)


def test_a_whole_layer_that_stays_local_may_be_meant():
    (found,) = found_in(local=(2, 3))
    assert found.severity.value == "note"
    assert found.subjects == ("head.weight", "head.bias")


NESTED = ("net.body", "net.last")


@pytest.mark.parametrize(("layers", "spread", "local", "severity"), [
    (NESTED, 0, (2, 3), "error"),
    (NESTED, -1, (2, 3), "note"),
    (LAYERS, 0, (2, 3), "note"),
    (("net.body", "head.last"), 0, (2, 3), "note"),
    (("net.norm1", "net.body", "net.body2", "net.norm2"), 0, (0, 1, 6, 7), "note"),
])  # fmt: skip
def test_the_rest_of_a_part_that_was_made_equal_is_not_meant(layers, spread, local, severity):
    """But a head by itself may be, and so may layers of one kind."""
    (found,) = found_in(local=local, layers=layers, spread=spread, count=2 * len(layers))
    assert (found.rule, found.severity.value) == ("never-synced", severity)
    assert found.confidence.value == ("suspected" if severity == "error" else "proven")


def changed(rows, step, positions, *, gradients):
    """At one step these differ on rank 1, among the gradients or else among the parameters."""
    told = next(s for s in rows[1] if s.step == step)
    each = unpack(told.each)
    for i in positions:
        each[i if gradients else 4 + i] += 7000
    rows[1][rows[1].index(told)] = msgspec.structs.replace(
        told, each=pack(each), parameters=told.parameters + 7000
    )


def test_parameters_that_are_exchanged_and_part_with_those_that_are_not():
    rows = {rank: list(states(rank, local=(2, 3), other=16)) for rank in (0, 1)}
    for step in (2, 4):
        changed(rows, step, (0, 1), gradients=False)
    changed(rows, 2, (0, 1), gradients=True)  # clipped by a norm of all
    (found,) = found_with(rows)
    assert found.severity.value == "error"
    assert found.subjects == ("head.weight", "head.bias")


def test_a_first_update_that_is_still_the_same():
    rows = {rank: list(states(rank, local=(1, 3), other=16)) for rank in (0, 1)}
    told = rows[0][1]
    values = unpack(told.each)[4:]
    each = unpack(rows[1][1].each)[:4] + values
    rows[1][1] = msgspec.structs.replace(rows[1][1], each=pack(each), parameters=told.parameters)
    (found,) = found_with(rows)
    assert (found.subjects, found.steps.first) == (("body.bias", "head.bias"), 2)


def test_copies_that_were_never_equal():
    (found,) = found_in(apart=(0, 1, 2, 3))
    assert (found.rule, found.severity.value) == ("unequal-start", "error")
    assert (found.location.line, found.steps.first) == (3, 0)


def test_a_start_from_weights_that_one_rank_alone_loaded():
    rows = {rank: list(states(rank, apart=range(4))) for rank in (0, 1)}
    for what, line in (("weights", 5), ("optimizer", 6)):
        under = Place(line, (Statement(line=4, text="if rank == 0:"),))
        load = Loaded(at=0, what=what, model=-1, step=0, site=line, optimizer=0, places=(under,))
        rows[0][:0] = [site(line, "train.py", line, f"{what}.load_state_dict(state)"), load]
    (found,) = found_with(rows)
    assert (found.rule, found.ranks, found.location.line) == ("load-on-some-ranks", (0,), 5)
    assert [r.location.line for r in found.related] == [6, 4, 9]


@pytest.mark.parametrize("kwargs", [
    pytest.param({}, id="equal"),
    pytest.param({"local": (0, 1, 2)}, id="most of it is local: no data parallelism"),
    pytest.param({"local": (1,), "apart": (0,)}, id="other values from the start"),
    pytest.param({"local": (1,), "change": {"averaged": 1}}, id="parameters are averaged too"),
    pytest.param({"local": (1,), "change": {"shared": 3}}, id="not in every step"),
    pytest.param({"local": (1,), "change": {"exchanged": "in backward"}}, id="tensor parallel"),
    pytest.param({"apart": (0,), "change": {"complete": False}}, id="a step of its own"),
    pytest.param({"apart": (0,), "clipped": True}, id="gradients of their own"),
])  # fmt: skip
def test_traps(kwargs):
    assert found_in(**kwargs) == []


def without_a_backward(*, elements=40, repeated=False, **kwargs):
    """The exchange is not known to be of gradients, which are the same everywhere all the same;
    each step exchanges so many elements (40 are all)."""
    rows = {rank: list(states(rank, **kwargs)) for rank in (0, 1)}
    for rank, told in rows.items():
        for i, s in enumerate(told):
            each = unpack(told[0].each)[:4] + unpack(s.each)[4:] if repeated else unpack(s.each)
            rows[rank][i] = msgspec.structs.replace(
                s, exchanged="parameters" if i else "", complete=False, completed=0, shared=0,
                averaged=s.step + 1, elements=elements * s.step, each=pack(each),
            )  # fmt: skip
    return found_with(rows)


def test_copies_that_were_never_equal_under_gradients_made_without_a_backward():
    (found,) = without_a_backward(apart=(0, 1, 2, 3))
    assert (found.severity.value, found.location.line, found.steps.first) == ("error", 3, 0)


@pytest.mark.parametrize("kwargs", [
    pytest.param({}, id="equal"),
    pytest.param({"apart": (0,), "clipped": True}, id="gradients of their own"),
    pytest.param({"local": (1,), "apart": (0,)}, id="some gradients of their own"),
    pytest.param({"apart": (0,), "elements": 10}, id="too little is exchanged to be gradients"),
    pytest.param({"apart": (0,), "repeated": True}, id="gradients that are constants"),
])  # fmt: skip
def test_copies_that_need_not_be_equal(kwargs):
    assert without_a_backward(**kwargs) == []


def mixed(ranks=(0, 1), at=0, lacking=((2,), (3,)), other=0):
    """From a step on ranks have no gradient of different parameters."""
    events = {}
    for rank in ranks:
        absent = AbsentGradients(
            at=0, optimizer=0, step=at, positions=pack(lacking[rank]), other=other
        )
        rows = list(states(rank, apart=(2, 3)))
        for i, told in enumerate(rows):
            each = unpack(told.each)
            if told.step <= at:
                each[4:] = [100 * told.step + i + 2 for i in range(4)]
            rows[i] = msgspec.structs.replace(told, each=pack(each), parameters=sum(each[4:]))
        events[rank] = [absent, *rows]
    return found_with(events)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_gradients_of_different_parameters_that_are_paired(at):
    (found,) = mixed(at=at)
    assert found.rule == "mismatched-gradients"
    assert found.subjects == ("head.weight", "head.bias")
    assert (found.location.line, found.steps.first, found.ranks) == (8, at, (0, 1))


def test_one_rank_lacks_gradients():
    (found,) = mixed(at=1, lacking=((), (2, 3)))
    assert (found.rule, found.ranks) == ("mismatched-gradients", (1,))
    assert "head.weight and head.bias got no gradient on rank 1" in found.cause


@pytest.mark.parametrize(("other", "rule"), [
    (0, "mismatched-gradients"),
    (20, "applied-on-some-ranks"),
])  # fmt: skip
def test_something_is_passed_in_the_place_of_a_gradient_or_not(other, rule):
    (found,) = mixed(other=other)
    assert found.rule == rule


def test_ranks_that_lack_the_same_gradients_pair_them_rightly():
    assert all(f.rule != "mismatched-gradients" for f in mixed(lacking=((2,), (2,))))


def averaged(rank, *, just=True, equal=False, changed=False):
    """Parameters that are passed to collectives before each look; each rank trains its own."""
    for told in states(rank, apart=() if equal else range(4), local=range(4)):
        yield msgspec.structs.replace(told, exchanged="parameters", just=just, completed=0)
    if changed:
        yield Averaged(at=0, optimizer=0, step=2, local=(1.0,), applied=(2.0,), kind="parameters")


@pytest.mark.parametrize(("fields", "lost"), [
    ({}, True),
    ({"just": False}, False),
    ({"equal": True}, False),
    ({"changed": True}, False),  # elastic averaging
])  # fmt: skip
def test_averages_of_parameters_that_do_not_come_back(fields, lost):
    told = found_with({rank: list(averaged(rank, **fields)) for rank in (0, 1)})
    assert [f.rule for f in told if f.rule == "averages-lost"] == ["averages-lost"] * lost


def running(rank, *, after=1, steps=3, clean=False):
    """Looks like those of `states`, at which all parameters differ from step `after` on."""
    for state in states(rank, apart=range(4)):
        equal = clean or state.step < after
        yield msgspec.structs.replace(
            state,
            parameters=state.step if equal else 10 * state.step + rank,
            exchanged="in backward",
            running=min(steps, state.step),
            running_site=3,
        )


def test_gradients_that_are_applied_while_they_are_exchanged():
    (found,) = found_with({n: list(running(n)) for n in (0, 1)})
    assert (found.rule, found.severity.value) == ("async-not-awaited", "error")
    assert (found.location.line, found.steps.first, found.ranks) == (8, 1, (0, 1))


def test_an_exchange_that_ran_on_and_did_no_harm():
    assert found_with({n: list(running(n, clean=True)) for n in (0, 1)}) == []


def test_copies_that_differed_before_any_exchange():
    assert found_with({n: list(running(n, after=0)) for n in (0, 1)}) == []


def test_an_exchange_that_was_over_is_not_blamed():
    assert found_with({n: list(running(n, steps=0)) for n in (0, 1)}) == []
