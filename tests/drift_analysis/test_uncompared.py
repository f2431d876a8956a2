"""What of wrapped models is not compared is said, with the reason."""

import msgspec
import pytest
from ddpdoctor.checks.drift.buffer_drift import BufferDrift
from ddpdoctor.checks.drift.double_averaging import DoubleAveraging
from ddpdoctor.checks.drift.grad_scaler_skew import GradScalerSkew
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from ddpdoctor.checks.drift.hyperparameter_skew import HyperparameterSkew
from ddpdoctor.checks.drift.optimizer_state_drift import OptimizerStateDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.drift.unsynced_step import UnsyncedStep
from recordings import make_run, steps
from replicas import STEP, replica

from ddpdoctor.events import Wrapped

BESIDE = (DoubleAveraging(), GradScalerSkew(), HyperparameterSkew(), UnsyncedStep())
"""Checks that do not compare parameters, and judge no model that is not compared at all."""

OF_PARAMETERS = (GradientDrift(), ParameterDrift(), OptimizerStateDrift())


def run_with(left_out="", **ignored):
    """`ignored`: of `parameters` or `buffers`, how many of the first are."""
    rows = {}
    for n in range(2):
        rows[n] = [*replica(left_out=left_out), *steps(4, site=STEP)]
        for i, event in enumerate(rows[n]):
            if isinstance(event, Wrapped):
                fields = {
                    kind: tuple(
                        msgspec.structs.replace(t, ignored=place < count)
                        for place, t in enumerate(getattr(event, kind))
                    )
                    for kind, count in ignored.items()
                }
                rows[n][i] = msgspec.structs.replace(event, **fields)
    return make_run(rows)


@pytest.mark.parametrize(("count", "said"), [(2, "2 parameters of Net"), (1, "1 parameter of Net")])
def test_parameters_that_ddp_is_told_to_ignore(count, said):
    run = run_with(parameters=count)
    for check in OF_PARAMETERS:
        told = check.left_out(run)
        assert told is not None and told.startswith(said)
        assert "_ddp_params_and_buffers_to_ignore" in told
    assert BufferDrift().left_out(run) is None


def test_buffers_that_ddp_is_told_to_ignore():
    run = run_with(buffers=2)
    assert "2 buffers of Net" in (BufferDrift().left_out(run) or "")
    assert not any(check.left_out(run) for check in OF_PARAMETERS)


def test_a_model_that_is_not_compared_at_all():
    run = run_with(left_out="its communication hook is local SGD")
    for check in (*OF_PARAMETERS, *BESIDE):
        assert check.left_out(run) == "Net, as its communication hook is local SGD"


def test_what_is_compared_needs_no_word():
    assert not any(check.left_out(run_with()) for check in (*OF_PARAMETERS, *BESIDE, BufferDrift()))
