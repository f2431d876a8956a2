"""What the probe takes for an exchange of gradients or parameters by hand, and when it looks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddpdoctor.probe.collectives import collectives
from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.collectives.process_groups import ProcessGroups
from ddpdoctor.probe.recording.devices import Captures
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.manual_sync import exchanges, limits, unwrapped
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchange, Exchanges
from ddpdoctor.probe.watchers.manual_sync.parallelism import Parallelism
from ddpdoctor.probe.watchers.manual_sync.unwrapped import UnwrappedModels


@pytest.fixture
def window(monkeypatch):
    fresh = Exchanges()
    monkeypatch.setattr(Exchanges, "current", fresh)
    monkeypatch.setattr(Parallelism, "current", Parallelism())
    return fresh


def trained(*sizes, shared=False):
    made = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    flat = torch.zeros(sum(sizes))
    for p, piece in zip(made, flat.split(list(sizes)), strict=True):
        p.grad = piece if shared else torch.zeros_like(p)
    return made


def handed(tensor, group=0):
    return Exchange(group, tensor.numel(), tensor.untyped_storage().data_ptr())


@pytest.mark.parametrize(
    ("hooks", "kept", "parameters"), [(set(), 1, 0), ({True}, 0, 0), ({True, False}, 1, 1)]
)
def test_what_is_exchanged_in_a_backward_are_no_parameters(
    window, monkeypatch, hooks, kept, parameters
):
    monkeypatch.setattr(Backwards.current, "running", lambda: True)
    monkeypatch.setattr(Backwards.current, "since", lambda step: False)
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    made = trained(8, 3)
    for average in hooks:
        Exchanges.current.hook_seen(average)
    recorder = SimpleNamespace(step=3)
    Exchanges.current._called(recorder, Call("all_reduce", 0, False, (torch.zeros(11),)))
    assert Exchanges.current.parameters_exchanged(made) is bool(parameters)
    assert Exchanges.current.before_backward() is bool(kept)
    assert Exchanges.current.values_exchanged(made)


def test_features_as_large_as_the_model_are_no_parameters(window, monkeypatch):
    monkeypatch.setattr(Backwards.current, "since", lambda step: False)
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    made = trained(8, 3)
    model = SimpleNamespace(pending=0, forward_step=3)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])

    def exchanged(*tensors, pending=0):
        window.earlier, model.pending = [], pending
        Exchanges.current._called(SimpleNamespace(step=3), Call("all_gather", 0, False, tensors))
        return Exchanges.current.parameters_exchanged(made)

    assert exchanged(torch.zeros(11)), "copies of them"
    assert not exchanged(torch.zeros(11), pending=1), "between a forward and its backward"
    assert not exchanged(torch.zeros(11).requires_grad_()), "the input of an autograd function"
    assert exchanged(*made, pending=1), "the parameters themselves"


def test_all_that_is_handed_over_counts(window, monkeypatch):
    monkeypatch.setattr(Backwards.current, "since", lambda step: False)
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    for op, p2p, tensor in (
        ("all_reduce", False, torch.zeros(3, 4)),
        ("send", True, torch.zeros(2)),
        ("all_gather", False, torch.zeros(5, dtype=torch.uint8)),
    ):
        Exchanges.current._called(SimpleNamespace(step=0), Call(op, 0, p2p, (tensor,)))
    assert Exchanges.current.numbers_passed == 19


def test_every_gradient_alone_or_copied_or_as_one(window):
    body, head = made = trained(8, 3)
    window.recent = [handed(body.grad), handed(head.grad)]
    assert Exchanges.current.gradients_passed(made).every
    copies = [body.grad.clone(), head.grad.clone()]
    window.recent = [handed(c) for c in copies]
    assert Exchanges.current.gradients_passed(made).every
    flat = torch.zeros(11)
    window.recent = [handed(flat)]
    assert Exchanges.current.gradients_passed(made).every
    window.recent = [handed(flat, group=1)]
    assert not Exchanges.current.gradients_passed(made).every
    window.recent = [handed(torch.zeros(n)) for n in (7, 4)]
    assert Exchanges.current.gradients_passed(made).every


@pytest.mark.parametrize("shared", [False, True])
def test_a_head_that_stays_local(window, shared):
    body, head = made = trained(8, 3, shared=shared)
    window.recent = [handed(body.grad)]
    assert Exchanges.current.gradients_passed(made) == ((0,), 0, -1, True)
    window.recent.append(handed(head.grad))
    assert Exchanges.current.gradients_passed(made).every


def test_one_of_two_that_are_alike_in_size(window):
    _, two = made = trained(8, 8)
    window.recent = [handed(two.grad)]
    assert Exchanges.current.gradients_passed([None, *made]) == ((2,), 0, -1, True)
    window.recent = [handed(two.grad), handed(torch.zeros(3))]
    assert Exchanges.current.gradients_passed(made) == ((1,), 3, -1, True)


@pytest.mark.parametrize("shared", [False, True])
def test_what_another_optimizer_holds_is_no_gradient_of_this_one(window, monkeypatch, shared):
    body, head = trained(8, 8, shared=shared)
    monkeypatch.setattr(Optimizers.current, "parameters", lambda: {id(p): p for p in (body, head)})
    window.recent = [handed(body.grad)]
    assert Exchanges.current.gradients_passed([head]).positions == (() if not shared else (0,))
    assert Exchanges.current.values_exchanged([head]) is shared
    window.recent = [handed(body.grad), handed(head.grad.clone())]
    assert Exchanges.current.gradients_passed([head]).every
    assert Exchanges.current.values_exchanged([head])
    body.grad = None
    window.recent = [handed(torch.zeros(8))]
    assert Exchanges.current.gradients_passed([head]).every, (
        "what it no longer holds may be a buffer"
    )


def test_who_gathers_parameters_may_only_look_at_them(window):
    (head,) = made = trained(8)
    window.recent = [handed(head.detach())._replace(gathered=True)]
    assert Exchanges.current.values_exchanged(made)
    assert not Exchanges.current.values_exchanged(made, gathered=False)


def test_optimizers_that_step_one_after_the_other(window, monkeypatch):
    _, head = trained(8, 3)
    monkeypatch.setattr(WrappedModels.current, "live", list)
    window.recent = [handed(torch.zeros(7)), handed(torch.zeros(4))]
    Exchanges.current._step_ends(SimpleNamespace(step=1), None)
    assert Exchanges.current.gradients_passed([head]).positions == ()
    assert window.recent, "no backward yet: what was exchanged is for the next optimizer too"
    Exchanges.current._backward_ends(SimpleNamespace(step=1), None)
    assert not window.recent


def test_parameters_are_no_gradients(window):
    made = trained(8, 3)
    window.recent = [handed(p.detach()) for p in made]
    assert not Exchanges.current.gradients_passed(made).every
    assert Exchanges.current.parameters_averaged(made)
    window.recent = [handed(p.grad) for p in made]
    assert not Exchanges.current.parameters_averaged(made)


def test_point_to_point_is_another_scheme(window):
    made = trained(8, 3)
    window.recent = [handed(p.grad) for p in made]
    Parallelism.current.seen("point-to-point", (1,))
    assert not Exchanges.current.gradients_passed(made).every


def test_a_group_whose_ranks_do_nothing_else_with_each_other(window, monkeypatch):
    made = trained(8, 3)
    others = {1: frozenset({2}), 2: frozenset({1, 3})}
    monkeypatch.setattr(
        ProcessGroups.current, "other_members", lambda group: others.get(group, frozenset())
    )
    Parallelism.current.seen("point-to-point", (1,))

    def group_of(*groups):
        window.recent = [handed(p.grad, g) for p, g in zip(made, groups, strict=True)]
        return Exchanges.current.gradients_passed(made).group

    assert group_of(1, 1) == 1, "what a stage of a pipeline sends goes to others"
    assert group_of(2, 2) == group_of(1, 2) == group_of(0, 0) == -1
    Parallelism.current.seen("point-to-point", (-1,))
    assert group_of(1, 1) == -1, "from any"


def test_a_norm_of_all_gradients_that_goes_to_another_group(window):
    made = trained(8, 3)
    window.recent = [*(handed(p.grad, 1) for p in made), handed(torch.zeros(1), 2)]
    assert Exchanges.current.gradients_passed(made).group == 1
    window.recent[-1] = handed(torch.zeros(2), 2)
    assert Exchanges.current.gradients_passed(made).group == -1
    (scale,) = trained(1)
    window.recent = [handed(scale.grad.clone(), 1)]
    assert Exchanges.current.gradients_passed([scale]).group == 1


@pytest.mark.parametrize(("groups", "told"), [
    ((1, 1, 1), [(True, 1, 0), (True, 1, 1), (True, 1, 2)]),
    ((1, -1, 1), [(True, 1, 0), (False, 1, 1), (True, 1, 1)]),
    ((0, 1, 0), [(True, 0, 0), (False, 0, 1), (True, 0, 1)]),
    ((1, 2, 1), [(True, 1, 0), (False, -1, 1), (False, -1, 1)]),
    ((1, 0, 1), [(True, 1, 0), (True, 0, 0), (False, 0, 1)]),
])  # fmt: skip
def test_steps_are_complete_in_one_group(groups, told):
    known = unwrapped.UnwrappedParameters([])
    seen = []
    for group in groups:
        complete = unwrapped._in_one_group(known, group)
        seen.append((complete, known.group, known.completed))
        known.completed += complete
    assert seen == told


@pytest.mark.parametrize("running", [True, False])
def test_a_gradient_in_the_memory_of_the_last_one_is_not_late_in_the_backward(
    window, monkeypatch, running
):
    monkeypatch.setattr(Backwards.current, "running", lambda: running)
    monkeypatch.setattr(Backwards.current, "since", lambda step: False)
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    (parameter,) = trained(8)
    Exchanges.current.gradients_applied([exchanges.Reference(parameter)])
    call = Call("all_reduce", 0, False, (parameter.grad,))
    Exchanges.current._called(SimpleNamespace(step=3), call)
    assert Exchanges.current.elements_in_backward() == (8 if running else 0)
    assert window.late == (set() if running else {id(parameter)})


def test_an_exchange_inside_the_backward_of_just_the_gradients(window):
    made = trained(8, 3)
    window.in_backward = [handed(torch.zeros(11))]
    Parallelism.current.seen("in backward", (1,))
    assert (
        Exchanges.current.all_passed_in_backward(made)
        and not Exchanges.current.gradients_passed(made).every
    )
    window.in_backward = [handed(p.grad) for p in made]
    assert Exchanges.current.all_passed_in_backward(made)
    window.in_backward += [handed(torch.zeros(5))]
    assert not Exchanges.current.all_passed_in_backward(made), "activations are among it"
    window.in_backward = [handed(torch.zeros(11))._replace(group=1)]
    assert not Exchanges.current.all_passed_in_backward(made)
    window.in_backward = [handed(torch.zeros(11))]
    Parallelism.current.seen("all-to-all", (1,))
    assert not Exchanges.current.all_passed_in_backward(made)
    window.in_backward = []
    assert not Exchanges.current.all_passed_in_backward(made)


def looks_taken(count, *, parameters_held=2, complete=lambda n: True):
    """The steps that are looked at, of `count`."""
    known = unwrapped.UnwrappedParameters(trained(*[1] * parameters_held))
    due = []
    for n in range(count):
        if unwrapped._digest_due(known, n, complete(n)):
            due.append(n)
        known.complete = complete(n)
        known.completed += complete(n)
    return due


def test_small_models_are_looked_at_in_every_early_step_and_seldom_later():
    due = looks_taken(4096)
    assert due[:64] == list(range(64))
    assert [n for n in due if n >= 2048] == list(range(2048, 4096, 128))


def test_large_models_and_such_that_exchange_nothing_are_looked_at_seldom():
    powers = [0, 1, 2, 4, 8, 16, 32, 64, 128]
    assert looks_taken(200, parameters_held=65)[2:] == powers[2:]
    assert looks_taken(200, complete=lambda n: False) == powers


def test_a_step_without_the_exchange_is_looked_at_and_the_next():
    due = looks_taken(200, parameters_held=65, complete=lambda n: n != 150)
    assert {150, 151} < set(due)
    often = looks_taken(2000, parameters_held=65, complete=lambda n: n % 2 == 0)
    assert len(often) <= limits.CHANGES_AT_MOST + 12


def test_the_step_after_an_exchange_of_unknown_means_is_looked_at(window):
    made = trained(8, 3)
    known = unwrapped.UnwrappedParameters(made)

    def after(numbers, means=""):
        window.numbers_passed += numbers
        known.exchanged = means
        return unwrapped._may_be_equal_now(known, made)

    assert [after(n) for n in (0, 11, 0, 5, 6)] == [False, True, False, False, True]
    assert not after(11, "parameters")
    assert sum(after(11) for _ in range(1000)) < limits.CHANGES_AT_MOST


def test_nothing_is_read_while_a_graph_is_recorded(monkeypatch):
    held = trained(3)
    known = unwrapped.UnwrappedParameters(held)
    monkeypatch.setattr(unwrapped, "_several_ranks", lambda: True)
    monkeypatch.setattr(UnwrappedModels.current, "_unwrapped_parameters", lambda *_: known)
    monkeypatch.setattr(unwrapped, "_write", lambda *_, **__: None)
    step = SimpleNamespace(
        known=SimpleNamespace(notes={}, number=0), optimizer=object, number=0, closure=False
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Captures, "running", 1)
    UnwrappedModels.current._step_due(SimpleNamespace(step=0), step)
    assert not known.waiting
    monkeypatch.setattr(Captures, "running", 0)
    UnwrappedModels.current._step_due(SimpleNamespace(step=0), step)
    assert known.waiting


@pytest.mark.parametrize("of_parameters", [True, False])
def test_gradients_that_no_backward_made(window, monkeypatch, of_parameters):
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    monkeypatch.setattr(Backwards.current, "since", lambda step: False)
    monkeypatch.setattr(WrappedModels.current, "live", list)
    made = trained(8, 3)
    recorder = SimpleNamespace(step=3, site=lambda: 1)
    Exchanges.current.autograd_grad_called(
        recorder, made if of_parameters else [torch.zeros(11, requires_grad=True)]
    )
    Exchanges.current._called(recorder, Call("all_reduce", 0, False, (torch.zeros(11),)))
    assert Exchanges.current.gradients_exchanged(made) is of_parameters
    assert Exchanges.current.parameters_exchanged(made) is not of_parameters
    Exchanges.current._step_ends(recorder, None)
    recorder.step = 4
    Exchanges.current._called(recorder, Call("all_reduce", 0, False, (torch.zeros(11),)))
    assert not Exchanges.current.gradients_exchanged(made), "after the step it is no gradient"


def test_who_is_on_the_other_side(monkeypatch):
    told = []
    messages = {}
    happens = SimpleNamespace(
        fire=lambda _, call: (
            told.append((call.op, call.peers)),
            messages.update({call.op: [m[:2] for m in call.messages]}),
        )
    )
    monkeypatch.setattr(collectives.call_hooks, "called", happens)
    monkeypatch.setattr(collectives, "call_log_of", lambda _: None)
    x = torch.zeros(2)
    for op, args in (("send", (x, 3)), ("recv", (x,)), ("all_reduce", (x,)), ("broadcast", (x, 1))):
        collectives._reader(getattr(dist, op), collectives.KINDS[op])(None, args, {})
    isend, irecv = (SimpleNamespace(__name__=name) for name in ("isend", "irecv"))
    batch = [
        SimpleNamespace(op=isend, peer=1, group=None, tensor=x),
        SimpleNamespace(op=irecv, peer=3, tensor=x),
    ]
    collectives._reader(dist.batch_isend_irecv, collectives.KINDS[collectives.BATCH])(
        None, (batch,), {}
    )
    assert told == [
        ("send", (3,)), ("recv", (-1,)), ("all_reduce", ()), ("broadcast", ()),
        (collectives.BATCH, (1, 3)),
    ]  # fmt: skip
    assert messages == {
        "send": [("send", 3)], "recv": [("recv", -1)], "all_reduce": [], "broadcast": [],
        collectives.BATCH: [("isend", 1), ("irecv", 3)],
    }  # fmt: skip
