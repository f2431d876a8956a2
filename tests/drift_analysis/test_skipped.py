"""Steps that some ranks leave out: how many, and until when the copies are apart."""

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import steps
from replicas import STEP, digests, run_of

from ddpdoctor.report.findings import Steps

COUNT = 6


def rank(*, skips=(), apart=range(99), ends=True):
    """Looks before every step of one that skips after some of the averaging backwards. While they
    are `apart`, one that skipped holds other parameters."""
    rows, made = {}, []
    for backwards in range(1, COUNT + 2):
        odd = any(s < backwards for s in skips) and backwards in apart
        values = [backwards, 2, 3, 4 + odd]
        if backwards <= COUNT and backwards not in skips:
            made.append(backwards)
            rows[len(made) - 1] = values
    end = digests("parameters", {COUNT: values}, point="end", backwards=(COUNT,))
    looks = digests("parameters", rows, backwards=tuple(made))
    return [looks, *steps(len(made), site=STEP), *([end] if ends else [])]


def told(*ranks):
    (finding,) = ParameterDrift().examine(run_of(dict(enumerate(ranks)), count=0))
    assert finding.rule in ("skipped-step", "fewer-steps")
    return finding


@pytest.mark.parametrize("ends", [True, False])
def test_copies_stay_apart_to_the_last_step(ends):
    finding = told(rank(ends=ends), rank(skips=(1,), ends=ends), rank(ends=ends))
    assert (finding.ranks, finding.steps) == ((1,), Steps(0, 5, 6))
    left = [{"rank": 1, "updates": 1}] if ends else None
    assert finding.evidence.get("updates_missing") == left


def test_all_steps_from_one_on():
    finding = told(rank(), rank(skips=(3, 4, 5, 6)))
    assert (finding.ranks, finding.steps) == ((1,), Steps(2, 5, 4))
    assert finding.evidence["updates_missing"] == [{"rank": 1, "updates": 4}]


@pytest.mark.parametrize(("apart", "steps"), [
    (range(2, 5), Steps(1, 3, 3)),  # equal after 5 backwards, before step 4 of the others
    (range(2, 3), Steps(1, 1, 1)),  # it made no difference
    (range(2, 7), Steps(1, 5, 5)),  # equal when the run was over
    ((3, 5, 6, 7), Steps(1, 5, 5)),  # equal for a moment
])  # fmt: skip
def test_copies_that_are_equal_again_are_apart_until_then(apart, steps):
    finding = told(rank(), rank(skips=(2,), apart=apart))
    assert finding.steps == steps


def misses(backward, *, synced):
    """A rank whose loss does not reach the model once: it runs a backward less, and as many
    steps."""
    made = [n + 1 - (n >= backward) for n in range(COUNT)]
    rows = {n: [m, 2, 3, 4 + (n > backward)] for n, m in enumerate(made)}
    looks = digests("parameters", rows, backwards=tuple(made))
    done = [
        msgspec.structs.replace(e, backwards=1, synced=int(n != backward or synced))
        for n, e in enumerate(steps(COUNT, site=STEP))
    ]
    return [looks, *done]


def test_a_backward_that_reaches_nothing():
    usual = misses(COUNT, synced=True)
    (finding,) = ParameterDrift().examine(
        run_of({0: usual, 1: misses(2, synced=False), 2: usual}, count=0)
    )
    assert (finding.rule, finding.ranks) == ("missed-backward", (1,))
    assert finding.steps == Steps(2, 5, 4)
    (finding,) = ParameterDrift().examine(run_of({0: usual, 1: misses(2, synced=True)}, count=0))
    assert (finding.rule, finding.ranks) == ("skipped-step", (0,))


def test_no_step_left_out():
    assert list(ParameterDrift().examine(run_of({0: rank(), 1: rank()}, count=0))) == []
