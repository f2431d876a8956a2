"""Totals that go on from their sum over the ranks, told by the numbers of the calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.watchers.data.running_totals import CALLS_AT_MOST, RunningTotals

RANKS = 2


class FakeRecorder:
    def __init__(self):
        self.step, self.events, self.line = 3, [], 1

    def site(self):
        return self.line

    def emit(self, event):
        self.events.append(event)


def calls(rounds, op=dist.ReduceOp.SUM, steps=lambda i: 3, lines=lambda i: 1):
    """What is recorded of `all_reduce` calls with these numbers; other ranks pass the same."""
    watcher, recorder = RunningTotals(), FakeRecorder()
    for i, numbers in enumerate(rounds):
        tensor = torch.tensor(numbers, dtype=torch.float64)
        recorder.step, recorder.line = steps(i), lines(i)
        watcher._called(recorder, Call("all_reduce", 0, False, (tensor,), op))
        tensor *= RANKS
        watcher._waited(recorder, 0.0)
    return recorder.events


def again(count, *added):
    """Totals that each round adds to, and that go on from the sum."""
    totals = [0.0] * len(added)
    for _ in range(count):
        totals = [t + a for t, a in zip(totals, added, strict=True)]
        yield list(totals)
        totals = [t * RANKS for t in totals]


def test_a_total_that_is_reduced_again():
    (event,) = calls(again(6, 8.0))
    assert event.passed == (8, 24, 56, 120)
    assert event.summed == (16, 48, 112, 240)


def test_several_numbers_in_a_call():
    (event,) = calls(again(4, 8.0, 0.0, 1.0))
    assert event.passed[:2] == (9, 27)


def test_two_totals_and_a_number_that_is_no_total_take_turns():
    rounds = [x for pair in zip(again(6, 8.0), again(6, 0.5), strict=True) for x in (*pair, [0.3])]
    events = calls(rounds, lines=lambda i: i % 3)
    assert [e.site for e in events] == [0, 1]


@pytest.mark.parametrize(
    ("rounds", "more"),
    [
        pytest.param(list(again(3, 8.0)), {}, id="too few rounds"),
        pytest.param([[8.0 * i] for i in range(1, 20)], {}, id="a total of this rank's own"),
        pytest.param([[float(RANKS**i)] for i in range(8)], {}, id="the sum itself, as in a trial"),
        pytest.param(list(again(8, 8.0)), {"steps": lambda i: i}, id="a loss that explodes"),
        pytest.param(list(again(8, 8.0)), {"lines": lambda i: i}, id="other lines"),
        pytest.param(list(again(8, 8.0)), {"op": dist.ReduceOp.MAX}, id="another operation"),
        pytest.param(list(again(8, -8.0)), {}, id="negative"),
        pytest.param([[1.0], [9.0, 9.0]] * 8, {}, id="other lengths"),
    ],
)
def test_what_is_not_a_total_that_goes_on(rounds, more):
    assert calls(rounds, **more) == []


@pytest.mark.parametrize(
    ("lines", "groups", "step", "told"),
    [
        ((1, 2), (0, 0), 3, True),
        ((1, 1), (0, 0), 3, False),  # a trial of the connection
        ((1, 2), (0, 1), 3, False),  # within each node, then of all
        ((1, 2), (0, 0), 0, False),  # before training
    ],
)
@pytest.mark.parametrize("changed", [False, True])
def test_a_tensor_that_two_lines_reduce(lines, groups, step, told, changed):
    watcher, recorder = RunningTotals(), FakeRecorder()
    recorder.step, tensor = step, torch.tensor([0.75])
    for line, group in zip(lines, groups, strict=True):
        recorder.line = line
        watcher._called(recorder, Call("all_reduce", group, False, (tensor,), dist.ReduceOp.SUM))
        tensor *= RANKS
        watcher._waited(recorder, 0.0)
        tensor /= RANKS if changed else 1
    assert [(e.first_site, e.site) for e in recorder.events] == [(1, 2)] * (told and not changed)
    if recorder.events:
        assert recorder.events[0].summed == (1.5, 3.0)


def test_only_so_many_calls_are_read():
    many = [[1.0]] * (CALLS_AT_MOST + 2)
    assert calls(many + list(again(6, 8.0))) == []
    one_each = calls(many + list(again(6, 8.0)), steps=lambda i: min(i, len(many)) + 1)
    assert len(one_each) == 1  # of a training loop, before an evaluation


def test_what_cannot_be_read():
    watcher, recorder = RunningTotals(), FakeRecorder()
    for tensor in (torch.ones(65), torch.ones(0), torch.ones(1, device="meta"),
                   torch.ones(1).cfloat()):  # fmt: skip
        watcher._called(recorder, Call("all_reduce", 0, False, (tensor,), dist.ReduceOp.SUM))
        assert watcher.waiting is None
    watcher._called(recorder, Call("all_reduce", 0, False, (torch.ones(1),), dist.ReduceOp.SUM))
    watcher._waited(recorder, 0.0)  # the tensor is gone
    assert not watcher.sums


def test_graph_tensors_are_left_alone():
    leaf = torch.ones(1, requires_grad=True)
    watcher = RunningTotals()
    call = Call("all_reduce", 0, False, (leaf,), SimpleNamespace(name="SUM"))
    watcher._called(FakeRecorder(), call)
    assert watcher.calls == 0
