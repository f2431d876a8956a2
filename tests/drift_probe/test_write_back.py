"""Local SGD writes to parameters what ranks exchange; a check of replicas does not."""

from types import SimpleNamespace

import pytest
import torch

from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.collectives.process_groups import ProcessGroups
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.gradients import limits, replica_digests
from ddpdoctor.probe.watchers.gradients.replica_digests import ReplicaDigests
from ddpdoctor.probe.watchers.manual_sync import exchanges
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchanges
from ddpdoctor.probe.watchers.manual_sync.parallelism import Parallelism


@pytest.fixture
def watch(monkeypatch):
    """Of two parameters, in a window that an optimizer's step has begun."""
    monkeypatch.setattr(Exchanges, "current", Exchanges())
    monkeypatch.setattr(Parallelism, "current", Parallelism())
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    monkeypatch.setattr(Backwards.current, "since", lambda step: False)
    monkeypatch.setattr(ReplicaDigests, "current", ReplicaDigests())
    monkeypatch.setattr(replica_digests, "Pace", lambda *_: None)
    monkeypatch.setattr(replica_digests, "_emit_replica", lambda *_: None)
    made = [torch.nn.Parameter(torch.ones(n)) for n in (8, 3)]
    model = SimpleNamespace(number=0, pending=0, forward_step=3)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    holding = SimpleNamespace(
        model=model, optimizer=0, positions=[0, 1], parameters=lambda at: [made[i] for i in at]
    )
    return ReplicaDigests.current._watch(recorder, holding)


recorder = SimpleNamespace(step=3, not_observed=lambda *_: None)


def parameters(watch):
    return watch.holding.parameters([0, 1])


def hand_over(*tensors, op="all_reduce"):
    call = Call(op, 0, False, tensors)
    Exchanges.current._called(recorder, call)
    ReplicaDigests.current._called(recorder, call)


def step(watch):
    """The next backward, and the optimizer's step after it. Whether the model is left out."""
    Exchanges.current._backward_ends(recorder, None)
    replica_digests._detect_local_sgd(recorder, watch)
    Exchanges.current._step_ends(recorder, None)
    return bool(watch.left_out)


def one_by_one(every, write):
    for parameter in every:
        copy = parameter.detach().clone()
        hand_over(copy)
        write(parameter, copy / 2)


def as_one(every, write):
    flat = torch.cat([p.detach().view(-1) for p in every])
    hand_over(flat)
    for parameter, piece in zip(every, flat.split([p.numel() for p in every]), strict=True):
        write(parameter, piece / 2)


def gathered(every, write):
    for parameter in every:
        hand_over(parameter.detach(), op="all_gather")
        write(parameter, parameter.detach() / 2)


def in_place(every, write):
    for parameter in every:
        hand_over(parameter.data)
        write(parameter, parameter.detach() / 2)


WAYS = (one_by_one, as_one, gathered, in_place)


@pytest.mark.parametrize("way", WAYS)
def test_a_check_of_the_replicas_writes_nothing(watch, way):
    for _ in range(3):
        way(parameters(watch), lambda *_: None)
        assert not step(watch)
        for parameter in parameters(watch):
            parameter.data.add_(1)  # the optimizer


def assign(parameter, value):
    parameter.data = value


@pytest.mark.parametrize("write", [assign, lambda p, value: p.data.copy_(value)])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_parameters_is_written_to_them(watch, way, write):
    way(parameters(watch), write)
    assert step(watch)


def test_also_after_checks_and_only_where_they_are_large_enough(watch):
    one_by_one(parameters(watch), lambda *_: None)
    assert not step(watch)
    hand_over(torch.zeros(2))
    parameters(watch)[0].data.add_(1)
    assert not step(watch), "a loss, say"
    one_by_one(parameters(watch), assign)
    assert step(watch)


def test_what_is_written_only_just_before_the_step(watch):
    copies = [p.detach().clone() for p in parameters(watch)]
    hand_over(*copies)
    Exchanges.current._backward_ends(recorder, None)
    for parameter, copy in zip(parameters(watch), copies, strict=True):
        assign(parameter, copy / 2)
    replica_digests._detect_local_sgd(recorder, watch)
    assert watch.left_out


def test_where_it_is_not_known_what_they_were_the_model_is_left_out(watch, monkeypatch):
    monkeypatch.setattr(
        replica_digests, "digest", lambda *_: None
    )  # a CUDA graph is being recorded
    one_by_one(parameters(watch), lambda *_: None)
    assert step(watch)


def test_nothing_waits_for_a_device(watch, monkeypatch):
    """What it has not answered yet is asked for again, at the end in any case."""

    class LateBuffers(replica_digests.Waiting):
        def ready(self, *, wait=False):
            return wait

    monkeypatch.setattr(replica_digests, "Waiting", LateBuffers)
    one_by_one(parameters(watch), assign)
    assert not step(watch)
    replica_digests._detect_local_sgd(recorder, watch, last=True)
    assert watch.left_out


# --- DDP's communication hooks ------------------------------------------------------------------


def in_a_hook(watch, monkeypatch, write, group=0):
    """A step in whose backward a hook exchanges as much as there are parameters, all at once."""
    with monkeypatch.context() as inside:
        inside.setattr(Backwards.current, "running", lambda: True)
        call = Call("all_reduce", group, False, (torch.ones(watch.size),))
        ReplicaDigests.current._called(recorder, call)
        Exchanges.current._called(recorder, call)
        for parameter in parameters(watch):
            write(parameter, parameter.detach() / 2)
    return step(watch)


@pytest.fixture
def hooked(watch, monkeypatch):
    Exchanges.current.hook_seen(False)
    monkeypatch.setattr(
        ProcessGroups.current, "other_members", lambda group: {0: {1, 2, 3}, 1: {1}}[group]
    )
    monkeypatch.setattr(replica_digests, "group_ranks", lambda _: (0, 1, 2, 3))
    watch.holding.model.ddp = lambda: SimpleNamespace(process_group=None)
    return watch


def test_a_hook_that_averages_gradients_leaves_the_parameters_alone(hooked, monkeypatch):
    digests = []
    monkeypatch.setattr(
        replica_digests,
        "digest",
        lambda *of, known=replica_digests.digest: digests.append(of) or known(*of),
    )
    for _ in range(3 * limits.ENOUGH_UNCHANGED):
        assert not in_a_hook(hooked, monkeypatch, lambda *_: None)
        for parameter in parameters(hooked):
            parameter.data.add_(1)  # the optimizer
    assert len(digests) == 2 * limits.ENOUGH_UNCHANGED, "then it is known"
    one_by_one(parameters(hooked), assign)
    assert step(hooked), "an exchange by hand is looked at as ever"


def test_a_hook_that_averages_parameters_is_local_sgd(hooked, monkeypatch):
    assert not in_a_hook(hooked, monkeypatch, lambda *_: None)
    assert in_a_hook(hooked, monkeypatch, assign)
    assert "parameters" in hooked.left_out


def test_a_hook_that_exchanges_among_some_ranks_only(hooked, monkeypatch):
    assert in_a_hook(hooked, monkeypatch, lambda *_: None, group=1)
    assert "smaller groups" in hooked.left_out


def test_torchs_own_hooks_are_not_looked_at(hooked, monkeypatch):
    Exchanges.current.hooks = {True}
    monkeypatch.setattr(replica_digests, "digest", lambda *_: pytest.fail("digested"))
    assert not in_a_hook(hooked, monkeypatch, lambda *_: None, group=1)
