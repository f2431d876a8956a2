"""A loss that is not finite is found where the program stops because of it."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.recording.code_locations import USER
from ddpdoctor.probe.watchers.numerics.stopped_before_backward import loss_in, own_error

RECORDER: Any = SimpleNamespace(sites=SimpleNamespace(kind=lambda code: USER))
LIBRARY: Any = SimpleNamespace(sites=SimpleNamespace(kind=lambda code: "library"))


def frames_of(keep: dict[str, Any]) -> list[FrameType]:
    def checks(total: Any) -> list[FrameType]:
        frame = sys._getframe()
        assert frame.f_back is not None and total is not None
        return [frame, frame.f_back]

    losses, total = keep["losses"], keep["total"]
    frames = checks(total)
    assert losses is not None
    return frames


def test_the_loss_and_the_outermost_function_that_has_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    losses = {"a": weight.sum(), "b": (weight / 0).sum()}
    total = losses["a"] + losses["b"]
    found = loss_in(RECORDER, frames_of({"losses": losses, "total": total}), torch.Tensor)
    assert found is not None
    assert found[0] is total
    assert found[1].f_code.co_name == "frames_of"
    losses["b"], whole = losses["a"], losses["a"] * 2
    assert loss_in(RECORDER, frames_of({"losses": losses, "total": whole}), torch.Tensor) is None
    detached = {"losses": {"b": total.detach()}, "total": total.item()}
    assert loss_in(RECORDER, frames_of(detached), torch.Tensor) is None
    assert loss_in(LIBRARY, frames_of({"losses": 0, "total": total}), torch.Tensor) is None


@pytest.mark.parametrize(
    ("recorder", "error", "own"),
    [
        (RECORDER, ValueError("bad"), True),
        (RECORDER, None, True),
        (RECORDER, KeyboardInterrupt(), False),
        (LIBRARY, RuntimeError("Connection closed by peer"), False),
        (LIBRARY, ValueError("Detected nan and/or inf values in the loss"), True),
    ],
)
def test_whose_error_it_is(recorder: Any, error: BaseException | None, own: bool) -> None:
    assert own_error(recorder, error, [sys._getframe()]) is own
    assert not own_error(recorder, error, [])
