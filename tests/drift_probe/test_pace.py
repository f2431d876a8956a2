"""How much of the doctor's budget the digests take."""

from types import SimpleNamespace

import pytest

from ddpdoctor.events.drift import full
from ddpdoctor.probe.recording import limits, sampling
from ddpdoctor.probe.recording.limits import BUDGET_SHARE, LEAST_SHARE
from ddpdoctor.probe.recording.sampling import Pace

STEP_NS = 20_000_000  # a budget of 1 % is 200 microseconds


def paced(monkeypatch, *, others_ns, tensors=64, steps=400, step_ns=STEP_NS):
    """Steps of 20 ms in which the rest of the doctor takes `others_ns`."""
    recorder = SimpleNamespace(every=0, budget_percent=1.0, own_ns=0)
    clock = [1]
    monkeypatch.setattr(sampling.time, "perf_counter_ns", lambda: clock[0])
    watched = Pace(recorder, tensors)
    spent = 0
    for step in range(steps):
        if step == steps // 2:
            spent = 0
        stride = watched.stride_at(step, 2, 1)
        if stride:
            looked = -(-tensors // stride) * 2
            cost = limits.FIXED_NS + int(limits.TENSOR_NS) * looked
            watched.spent(cost, looked)
            recorder.own_ns += cost
            spent += cost
        recorder.own_ns += others_ns
        clock[0] += step_ns
    return spent / (steps - steps // 2), watched


def test_a_rest_of_the_doctor_that_costs_little_leaves_the_full_share(monkeypatch):
    spent, _ = paced(monkeypatch, others_ns=20_000)
    assert spent <= 1.2 * BUDGET_SHARE * STEP_NS / 100
    assert spent >= 0.3 * BUDGET_SHARE * STEP_NS / 100


def test_digests_make_room_for_the_rest(monkeypatch):
    rich, _ = paced(monkeypatch, others_ns=20_000)
    poor, watched = paced(monkeypatch, others_ns=250_000)
    assert watched.others_ns == pytest.approx(250_000, rel=0.1)
    assert poor < rich / 2
    assert poor <= 2 * LEAST_SHARE * STEP_NS / 100
    assert poor > 0, "never given up altogether"


def test_every_tensor_comes_round_however_little_is_left(monkeypatch):
    from ddpdoctor.events.drift import chosen

    recorder = SimpleNamespace(every=0, budget_percent=1.0, own_ns=0)
    clock = [1]
    monkeypatch.setattr(sampling.time, "perf_counter_ns", lambda: clock[0])
    watched = Pace(recorder, 64)
    seen: set[int] = set()
    for step in range(100, 100 + 64 * 64):
        if stride := watched.stride_at(step, 2, 1):
            seen.update(chosen(step, stride, 64))
        recorder.own_ns += 1_000_000
        clock[0] += STEP_NS
    assert seen == set(range(64))


@pytest.mark.parametrize("others_ns", [20_000, 5_000_000])
def test_a_step_that_is_passed_over_is_none_that_would_be_looked_at(monkeypatch, others_ns):
    """Asked in every step, or in those only that are not passed over: the same looks."""

    def looks(ask):
        recorder = SimpleNamespace(every=0, budget_percent=1.0, own_ns=0)
        clock = [1]
        monkeypatch.setattr(sampling.time, "perf_counter_ns", lambda: clock[0])
        watched = Pace(recorder, tensors=64)
        found = []
        for step in range(3000):
            if ask(watched, step) and watched.stride_at(step, 2, 1):
                found.append(step)
            recorder.own_ns += others_ns
            clock[0] += STEP_NS
        return found

    every = looks(lambda watched, step: True)
    assert looks(lambda watched, step: not watched.skips(step)) == every
    assert any(full(step) for step in every if step > limits.FIRST_STEPS)
    _, watched = paced(monkeypatch, others_ns=others_ns)
    assert not any(watched.skips(step) for step in range(200_000) if full(step))
