"""DDP402 without a wrapper, on literal events: an optimizer that the exchange leaves out."""

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.model.model_not_wrapped import ModelNotWrapped
from recordings import make_run, site, steps
from wraps import group

from ddpdoctor.events import Tensor, Unwrapped, UnwrappedState
from ddpdoctor.events.pack import pack

LOOKS = (0, 1, 2, 4)
MADE = [site(1, "train.py", 3, "net = Net()"), site(2, "train.py", 9, "adam.step()"),
        site(3, "train.py", 8, "dist.all_reduce(p.grad)")]  # fmt: skip


def looks(rank, optimizer, count, *, local, agree=(), apart=range(9), equal_at=(), other=0):
    """Of parameters that nobody exchanges (`local`), gradients differ but those at `agree`; values
    differ at `apart` after the first step, but at no parameter at the steps `equal_at`."""
    own = 1000 * (rank + 1)
    for step in LOOKS:
        gradients = [10 * step + i + 2 for i in range(count)]
        values = [100 * step + i + 2 for i in range(count)]
        if local:
            gradients = [g if i in agree else g + own for i, g in enumerate(gradients)]
        if local and step and step not in equal_at:
            values = [v + own if i in apart else v for i, v in enumerate(values)]
        yield UnwrappedState(
            at=0,
            optimizer=optimizer,
            step=step,
            gradients=sum(gradients),
            parameters=sum(values),
            exchanged="" if local else "gradients",
            complete=not local,
            completed=0 if local else step,
            shared=0 if local else step + 1,
            each=pack([*gradients, *values]),
            handed="" if local else pack(range(count)),
            other=other if local else 0,
            exchange_site=3,
        )


def rows(rank, *, names, others, roots=(5, 5), change=None, end=None, **kwargs):
    """Optimizer 0 is exchanged, optimizer 1 is not."""
    for optimizer, held in enumerate((others, names)):
        yield Unwrapped(
            at=0,
            optimizer=optimizer,
            kind="Net",
            root=roots[optimizer],
            site=1,
            step_site=2,
            parameters=tuple(Tensor(n, (4,), "float32", trainable=True) for n in held),
        )
    yield from looks(rank, 0, len(others), local=False)
    told = list(looks(rank, 1, len(names), local=True, **kwargs))
    if change is not None:
        told[-1] = msgspec.structs.replace(told[-1], **change)
    yield from told
    if end is not None:
        last = msgspec.structs.replace(told[-1], step=8, last=True, each="", handed="")
        yield msgspec.structs.replace(last, **end)


def run_of(names=("head.weight", "head.bias"), others=("body.weight", "up.weight"), **kwargs):
    return make_run({
        r: [*MADE, group((0, 1)), *rows(r, names=names, others=others, **kwargs), *steps(8)]
        for r in (0, 1)
    })  # fmt: skip


def found_in(**kwargs):
    return list(ParameterDrift().examine(run_of(**kwargs)))


@pytest.mark.parametrize(("names", "severity"), [
    (("head.weight", "head.bias"), "note"),
    (("scale",), "note"),
    (("emb.weight", "head.weight", "scale"), "warning"),
    (("body.bias", "up.bias"), "error"),
])  # fmt: skip
def test_an_optimizer_that_the_exchange_leaves_out(names, severity):
    (found,) = found_in(names=names)
    assert (found.severity.value, found.subjects) == (severity, names)
    assert (found.location.line, found.ranks, found.steps.first) == (9, (0, 1), 1)
    assert [place.location.line for place in found.related] == [8, 3]


def test_the_rest_of_a_model_of_which_one_part_is_exchanged_may_be_meant():
    (found,) = found_in(names=("emb.weight", "body.weight"), others=("head.weight", "head.bias"))
    assert found.severity.value == "note"


def test_it_is_told_once():
    assert list(ModelNotWrapped().examine(run_of())) == []
    (found,) = ModelNotWrapped().examine(run_of(roots=(5, 6)))
    assert found.severity.value == "error", "a model of its own is not wrapped"


def test_parameters_that_are_looked_at_in_the_end():
    assert found_in(end={"exchanged": "gathered"})
    assert not found_in(end={"exchanged": "parameters"})


@pytest.mark.parametrize("kwargs", [
    pytest.param({"roots": (5, 6)}, id="models of their own"),
    pytest.param({"roots": (-1, -1)}, id="in no module"),
    pytest.param({"equal_at": (1, 2, 4)}, id="exchanged in its own step"),
    pytest.param({"equal_at": (2,)}, id="equal again"),
    pytest.param({"agree": (0, 1)}, id="exchanged unseen"),
    pytest.param({"agree": (1,)}, id="one of them is exchanged unseen"),
    pytest.param({"apart": ()}, id="never apart"),
    pytest.param({"change": {"exchanged": "parameters"}}, id="averaged"),
    pytest.param({"change": {"averaged": 1}}, id="averaged in place"),
    pytest.param({"change": {"shared": 1}}, id="gradients exchanged now and then"),
    pytest.param({"change": {"late": 1}}, id="exchanged too late"),
    pytest.param({"change": {"handed": pack([0])}}, id="one of them is exchanged"),
    pytest.param({"end": {"parameters": 7}}, id="equal in the end"),
])  # fmt: skip
def test_traps(kwargs):
    assert found_in(**kwargs) == []


def test_values_of_their_own_from_the_start():
    events = {
        r: [
            msgspec.structs.replace(e, parameters=e.parameters + r)
            if isinstance(e, UnwrappedState) and e.optimizer and not e.step
            else e
            for e in [*MADE, group((0, 1)),
                      *rows(r, names=("head.weight",), others=("up.weight", "body.weight"))]
        ]
        for r in (0, 1)
    }  # fmt: skip
    assert list(ParameterDrift().examine(make_run(events))) == []
