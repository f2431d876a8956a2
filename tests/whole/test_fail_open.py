"""The doctor broken on purpose while a run goes on: training must not notice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType

import pytest
from sampling import ROOT, inherited, run

from ddpdoctor.monitor.monitor import Monitor
from ddpdoctor.probe.bootstrap import activation, install


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "which",
    [
        {"EVERY": "30"},
        pytest.param({"EVERY": "1"}, marks=pytest.mark.exhaustive),
        pytest.param({"LIGHT": "1"}, marks=pytest.mark.exhaustive),
    ],
)
def test_every_function_of_the_probe_may_fail(which: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "broken_probe.py")],
        env=inherited(PLACE=str(tmp_path), **which),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^broke \d+ of \d+ functions", done.stdout, re.M), done.stderr[-3000:]


TRAIN = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SETUP

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


@dataclass(frozen=True)
class Trouble:
    """What goes wrong for the doctor while TRAIN runs.

    Attributes:
        setup, during: code for its two places.
        mount: shell commands, run first where nobody else sees what they mount.
        doctor: code to run in the doctor's own process first.
        told: in the report.
    """

    setup: str = "pass"
    during: str = "pass"
    mount: str = ""
    doctor: str = ""
    told: str = ""


TMPFS = "mount -t tmpfs -o size=64k tmpfs"

HARD_TIMES = {
    "disk full": Trouble(
        setup="import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))",
        told="could not record|stop early",
    ),
    "odd surroundings": Trouble(
        setup="os.environ.pop('HOME', None)\n"
        "import tempfile, time\n"
        "os.closerange(3, 4096)\n"
        "opened = [tempfile.TemporaryFile() for _ in range(1000)]\n"
        "real, jump = time.time, [0.0]\n"
        "time.time = lambda: real() + jump[0]",
        during="jump[0] += 3600 * (-1) ** step\n"
        "    assert not any(os.fstat(file.fileno()).st_size for file in opened)",
        told="2 ranks, 5 steps",
    ),
    "folder gone": Trouble(
        setup="import shutil",
        during="shutil.rmtree(os.environ.get('DDPDOCTOR_DIR', '/nowhere'), ignore_errors=True)",
    ),
    "folder closed": Trouble(
        mount="true",
        setup="if os.environ['RANK'] == '0':\n"
        "    place = os.environ['DDPDOCTOR_DIR']\n"
        "    for how in ('--bind', '-oremount,bind,ro'):\n"
        "        assert os.spawnlp(os.P_WAIT, 'mount', 'mount', how, place, place) == 0",
        told="not observed.*the last calls before a kill|the records are in",
    ),
    "no more files": Trouble(
        setup="import resource",
        during="step or resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        told="on ranks 0-1; not observed: memory of this rank",
    ),
    "another torch": Trouble(
        setup="import types\n"
        "def missing(*args, **kwargs):\n"
        "    raise AttributeError('another version of torch')\n"
        "private = sys.modules.get('ddpdoctor.probe.recording.torch_compat')\n"
        "for value in vars(private).values() if private else ():\n"
        "    own = isinstance(value, types.FunctionType) and value.__module__ == private.__name__\n"
        "    if own and value.__closure__ is None:  # not of a context manager\n"
        "        value.__code__ = missing.__code__",
        told="not observed",
    ),
    "small /dev/shm": Trouble(mount=f"{TMPFS} /dev/shm"),
    "small disk": Trouble(
        mount=f"{TMPFS} $PLACE", told="could not record|cut short|stop early|not observed"
    ),
}
UNTOLD = ("_last_words", "_write", "failed", "reaped", "record", "stopped", "swept")
"""Of the monitor's methods those that tell, and those that runs which end well have no use for."""

HARD_TIMES |= {
    f"monitor without {method}": Trouble(
        doctor="from ddpdoctor.monitor.monitor import Monitor\n"
        "def fail(*args, **kwargs): raise RuntimeError('injected')\n"
        f"Monitor.{method} = fail",
        told="" if method in UNTOLD else r"the (monitor|last look) failed.*\n?.*injected",
    )
    for method, value in vars(Monitor).items()
    if isinstance(value, FunctionType) and method not in ("__init__", "start")
}
FEW = ("disk full", "odd surroundings", "folder gone")
"""In every test run; the others where `-m exhaustive` asks for them (make no-harm)."""

FORKED = FEW[1:]
"""From a Python with torch imported, in every test run; all others in new processes."""


def sums_of(printed: str) -> list[str]:
    """What the two ranks computed."""
    sums = re.findall(r"sum (-?[\d.e-]+)", printed)
    assert len(sums) == 2, printed
    return sums


@cache
def alone() -> list[str]:
    """What TRAIN computes without the doctor."""
    with TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(re.sub("SETUP|DURING", "pass", TRAIN))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        # The status does not count: torch itself aborts now and then when correct scripts leave.
        words = [sys.executable, "-m", *torchrun, str(script)]
        _, printed = run(words, cwd=Path("/proc"), forked=True)
        return sums_of(printed)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW else pytest.mark.exhaustive) for n in HARD_TIMES],
)
def test_training_goes_on_in_hard_times(name: str, tmp_path: Path) -> None:
    trouble = HARD_TIMES[name]
    place = tmp_path / "place"
    place.mkdir()
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("SETUP", trouble.setup).replace("DURING", trouble.during))
    main = f"{trouble.doctor}\nimport sys\nfrom ddpdoctor.cli import main\nsys.exit(main())"
    started = ["-c", main] if trouble.doctor else ["-m", "ddpdoctor"]
    doctor = [sys.executable, *started, "run", "--out", str(place / "run")]
    command = [*doctor, "--nproc-per-node", "2", str(script)]
    if trouble.mount:
        command = [*after(trouble.mount, place), *command]
    status, printed = run(command, cwd=Path("/proc"), forked=name in FORKED)
    assert status == 0, printed[-3000:]
    assert sums_of(printed) == alone()
    assert "Traceback" not in printed
    assert re.search(trouble.told, printed), printed
    assert "error[" not in printed and "warning[" not in printed, printed


def after(mount: str, place: Path) -> list[str]:
    """What runs a command with file systems mounted that nobody else sees."""
    words = ["unshare", "-m" if os.getuid() == 0 else "-rm", "sh", "-c"]
    tried = [*words, f"{TMPFS} /dev/shm"]
    if not shutil.which("unshare") or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("may not mount")
    return [*words, f'PLACE="{place}"; {mount} && exec "$@"', "sh"]


def test_a_probe_that_cannot_be_put_in_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []

    class Active:
        def trouble(self, *what: object) -> None:
            told.append(what)

    def fail(activate: object) -> None:
        raise ImportError("half an installation")

    monkeypatch.setattr(activation, "current_recorder", Active)
    monkeypatch.setattr(activation._state, "patched", False)
    monkeypatch.setattr(install, "install", fail)
    with pytest.raises(ImportError):  # the shim writes it down and goes on
        activation.torch_loaded()
    assert [(part, lost) for part, _, lost in told] == [("hooks", "training: torch is not watched")]
