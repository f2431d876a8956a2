"""Samples on the device that is asked for: `samples/_on_device.py`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from sampling import (
    ROOT,
    SAMPLES,
    Sample,
    collect,
    device_samples,
    differences,
    examine,
    lacking_on_device,
    on_device,
    run,
)

from ddpdoctor.launch.devices import visible_gpus

RUNNER = SAMPLES / "_on_device.py"
ALWAYS = {"drift/parameter_drift", "model/unused_parameter_clean"}


@pytest.mark.timeout(130)
@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_on_the_cpu_it_is_as_without(name: str, tmp_path: Path) -> None:
    (sample,) = (s for s in collect() if s.name == name)
    assert differences(sample, examine(on_device(sample, "cpu"), tmp_path)) == []


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.skipif(visible_gpus() < 1, reason="needs a GPU")
@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in device_samples()])
def test_on_a_gpu(sample: Sample, tmp_path: Path) -> None:
    """What cannot be seen there is said to be unseen; what is found is what is there."""
    report = examine(on_device(sample, "cuda"), tmp_path)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert lacking_on_device(sample, report) == []


def test_tensors_meet_on_the_device() -> None:
    """`meta` stands for it: a device that every machine has."""
    made = runpy.run_path(str(RUNNER))
    weight = torch.nn.Parameter(torch.ones(3, 4, device="meta"))
    total = torch.zeros(())
    with made["OnDevice"]("meta"):
        out = torch.nn.functional.linear(torch.ones(5, 4), weight)
        loss = torch.nn.functional.mse_loss(out, torch.zeros(5, 3))
        loss.backward()
        moved = torch.zeros(2, device="meta")
        moved.add_(torch.ones(2))
        assert (total + 1).device.type == "cpu"
    assert loss.device.type == "meta" and weight.grad is not None


def test_what_optimizers_are_given_is_moved() -> None:
    made = runpy.run_path(str(RUNNER))
    layer, one = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": layer.parameters(), "lr": 0.1}, {"params": one}]
    for given in (layer.parameters(), layer.named_parameters(), groups):
        optimizer = torch.optim.SGD(made["move_parameters"](given, "cpu"), lr=0.1)
        assert optimizer.param_groups[0]["params"] == [layer.weight, layer.bias]
    assert optimizer.param_groups[1]["params"] == [one]


@pytest.mark.skipif(visible_gpus() > 0, reason="there is a GPU")
def test_the_first_hour_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    status, printed = run([sys.executable, str(ROOT / "tests" / "first_hour.py")], cwd=tmp_path)
    assert status == 0
    assert printed.strip() == "there is no GPU here: nothing was tried"
