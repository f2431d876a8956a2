"""The doctor broken on purpose while a run goes on: training must not notice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import ROOT, inherited, run

import ddpdoctor
from ddpdoctor.probe import activation, hooks


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", ["12", pytest.param("1", marks=pytest.mark.exhaustive)])
def test_every_hook_may_fail(every: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "broken_probe.py")],
        env=inherited(PLACE=str(tmp_path), EVERY=every),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert re.search(r"^broke \d+ of \d+ hooks", done.stdout, re.M), done.stderr[-3000:]


TRAIN = """
import os
import sys

SETUP

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    DURING
sys.stdout.write(f"sum {sum(p.double().sum().item() for p in model.parameters())!r}\\n")
dist.destroy_process_group()
"""

HARD_TIMES = {
    "disk full": (
        "import resource, torch\nresource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))",
        "pass",
    ),
    "odd surroundings": (
        "os.environ.pop('HOME', None)\n"
        "opened = [open('/dev/null') for _ in range(1000)]\n"
        "import time\n"
        "real, jump = time.time, [0.0]\n"
        "time.time = lambda: real() + jump[0]",
        "jump[0] += 3600 * (-1) ** step",
    ),
    "folder gone": (
        "import shutil",
        "shutil.rmtree(os.environ.get('DDPDOCTOR_DIR', '/nowhere'), ignore_errors=True)",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("trouble", HARD_TIMES)
def test_training_goes_on_in_hard_times(trouble: str, tmp_path: Path) -> None:
    setup, during = HARD_TIMES[trouble]
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("SETUP", setup).replace("DURING", during))
    out = tmp_path / "run"
    doctor = [sys.executable, "-m", "ddpdoctor", "run", "--out", str(out), "--nproc-per-node", "2"]
    status, printed = run([*doctor, str(script)], cwd=Path("/proc"))
    assert status == 0, printed[-3000:]
    sums = re.findall(r"sum (-?[\d.]+)", printed)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    assert "Traceback" not in printed
    if trouble != "folder gone":
        report = ddpdoctor.load(out)
        assert report.run.world_size == 2
        assert [f for f in report.findings if f.severity.value == "error"] == []
    if trouble == "disk full":
        assert "could not record" in printed or "cut short" in printed


def test_a_probe_that_cannot_be_put_in_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []

    class Active:
        def trouble(self, *what: object) -> None:
            told.append(what)

    def fail(activate: object) -> None:
        raise ImportError("half an installation")

    monkeypatch.setattr(activation, "recorder", Active)
    monkeypatch.setattr(activation._state, "patched", False)
    monkeypatch.setattr(hooks, "install", fail)
    with pytest.raises(ImportError):  # the shim writes it down and goes on
        activation.torch_loaded()
    assert [(part, lost) for part, _, lost in told] == [("hooks", "training: torch is not watched")]
