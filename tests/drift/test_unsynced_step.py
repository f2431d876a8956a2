"""DDP407 on literal events."""

import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.drift.unsynced_step import CAUSES, UnsyncedStep
from replicas import BACKWARD, LINE, digests, run_of

from ddpdoctor.events import SyncPattern


def pattern(step=0, reason="no_sync", synced=0, unsynced=1, talked=False, optimizer=0):
    return SyncPattern(
        at=0, model=0, optimizer=optimizer, step=step, synced=synced, unsynced=unsynced,
        reason=reason, site=LINE, backward_site=BACKWARD, talked=talked,
    )  # fmt: skip


def local(*values):
    return digests("local", {0: values})


@pytest.mark.parametrize("reason", CAUSES)
def test_every_way_to_step_without_averaging(reason):
    run = run_of({n: [pattern(reason=reason), local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert (finding.ranks, finding.location.line) == ((0, 1), 33)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (0, 3, 4)
    assert "all ranks" in finding.summary


def test_a_synchronised_last_backward():
    run = run_of({n: [pattern(reason="", synced=1, unsynced=3)] for n in range(2)})
    assert list(UnsyncedStep().examine(run)) == []


def test_some_steps_only():
    events = [pattern(reason="", synced=1), pattern(step=2), pattern(step=3, reason="", synced=1)]
    run = run_of({n: [*events, local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert (finding.steps.first, finding.steps.count) == (2, 1)


def test_gradients_averaged_by_hand():
    run = run_of({n: [pattern(talked=True), local(1, 2, 3, 4)] for n in range(2)})
    assert list(UnsyncedStep().examine(run)) == []


def test_local_sgd_by_what_the_parameters_do():
    for n_equal in (True, False):
        ranks = {
            n: [pattern(), local(1, 2, 3, n),
                digests("parameters", {1: [1, 1, 1, n], 2: [1, 1, 1, 1 if n_equal else n]})]
            for n in range(2)
        }  # fmt: skip
        assert bool(list(UnsyncedStep().examine(run_of(ranks)))) is not n_equal


def test_what_drifts_later_follows_from_it():
    ranks = {
        n: [pattern(), local(1, 2, 3, n), digests("parameters", {1: [1, 1, 1, n]})]
        for n in range(2)
    }
    run = run_of(ranks)
    (cause,), (effect,) = UnsyncedStep().examine(run), ParameterDrift().examine(run)
    assert UnsyncedStep().explains(cause, effect)
