"""The doctor as a callback or a tracker: stubs of the frameworks show what it does, and the real
ones (`make frameworks`) that they call it."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from sampling import run

from ddpdoctor.embedded import Steps, session
from ddpdoctor.report.findings import Report

HERE = Path(__file__).parent / "entries"
PATIENCE_S = 60


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frameworks that hold nothing but the base classes."""
    for name, inside in (
        ("lightning", "lightning.pytorch.callbacks.Callback"),
        ("transformers", "transformers.TrainerCallback"),
        ("accelerate", "accelerate.tracking.GeneralTracker"),
    ):
        path, _, base = inside.rpartition(".")
        for number in range(len(path.split("."))):
            whole = ".".join(path.split(".")[: number + 1])
            monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
        setattr(sys.modules[path], base, type(base, (), {}))
        monkeypatch.delitem(sys.modules, f"ddpdoctor.integrations.{name}", raising=False)
    yield
    for name in [n for n in sys.modules if n.startswith("ddpdoctor.integrations.")]:
        del sys.modules[name]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the examination, in order."""
    seen: list[str] = []
    steps = {"__enter__": "begins", "__exit__": "ends", "begin": "starts", "left": "raised"}
    for name, word in steps.items():
        monkeypatch.setattr(Steps, name, lambda *of, word=word: seen.append(word))
    monkeypatch.setattr(Steps, "_prepare", lambda self: seen.append("prepared"))
    return seen


@pytest.mark.usefixtures("stubs")
def test_lightning_calls(done: list[str]) -> None:
    from ddpdoctor.integrations.lightning import DoctorCallback

    callback = DoctorCallback(raise_on="error")
    callback.setup(None, None, "validate")
    callback.setup(None, None, "fit")
    callback.on_train_batch_start(None, None, (), 0)
    callback.on_train_batch_end(None, None, None, (), 0)
    callback.on_exception(None, None, ValueError())
    assert done == ["prepared", "starts", "begins", "ends", "raised"]
    assert callback.report is None


@pytest.mark.usefixtures("stubs")
def test_transformers_calls(done: list[str]) -> None:
    from ddpdoctor.integrations.transformers import DoctorCallback

    callback = DoctorCallback()
    callback.on_train_begin(None, None, None)
    callback.on_step_begin(None, None, None, model=None)
    callback.on_step_end(None, None, None, model=None)
    assert done == ["prepared", "starts", "begins", "ends"]


@pytest.mark.usefixtures("stubs")
def test_accelerate_calls(done: list[str]) -> None:
    from ddpdoctor.integrations.accelerate import DoctorTracker

    tracker = DoctorTracker(every=5)
    tracker.start()
    assert done == ["prepared", "starts"] and tracker.tracker is None
    assert tracker.main_process_only is False
    with pytest.raises(ValueError, match="takes no raise_on"):
        DoctorTracker(raise_on="error")


@pytest.mark.usefixtures("stubs")
def test_bad_options_are_told_at_once(done: list[str]) -> None:
    from ddpdoctor.integrations import accelerate, lightning, transformers

    for entry in (
        accelerate.DoctorTracker, lightning.DoctorCallback, transformers.DoctorCallback,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="did you mean 'every'"):
            entry(evry=3)
    assert done == []


def test_a_spawned_process_prepares_again(done: list[str]) -> None:
    copy = pickle.loads(pickle.dumps(session.steps_of({"every": 3})))
    assert done == ["prepared", "prepared"] and copy._asked == {"every": 3}


def test_no_framework_is_imported_unasked() -> None:
    code = (
        "import sys, ddpdoctor.embedded, ddpdoctor.integrations, ddpdoctor.exporters\n"
        "wrong = {'lightning', 'transformers', 'accelerate', 'wandb', 'tensorboard'}\n"
        "assert not wrong & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def report_in(folder: Path) -> Report:
    deadline = time.monotonic() + PATIENCE_S
    while list(folder.glob(".monitor-*")) or not (folder / "findings.json").exists():
        assert time.monotonic() < deadline, "the monitor never ended"
        time.sleep(0.1)
    return msgspec.json.decode((folder / "findings.json").read_bytes(), type=Report)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHES = {
    "lightning_callback": (TORCHRUN, [sys.executable]),
    "transformers_callback": (TORCHRUN,),
    "accelerate_tracker": (TORCHRUN,),
}


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_real_framework(name: str, tmp_path: Path) -> None:
    needed = name.partition("_")[0]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (make frameworks)")
    for number, launcher in enumerate(LAUNCHES[name]):
        for words in ([], ["faulty"]):
            folder = tmp_path / f"{number}{len(words)}"
            folder.mkdir()
            os.environ.pop("OMP_NUM_THREADS", None)
            command = [*launcher, str(HERE / f"{name}.py"), *words]
            status, printed = run(command, cwd=folder, limit_s=400)
            report = report_in(folder / "run")
            errors = [f.code for f in report.findings if f.severity.value != "note"]
            assert report.run.world_size == 2
            assert not (folder / "run-2").exists(), "all ranks record to one folder"
            if words:
                assert errors == ["DDP301"], printed[-3000:]
                stopped = re.findall(r"rank (\d) stopped: (DDP\d+)", printed)
                if name != "accelerate_tracker":
                    assert sorted(stopped) == [("0", "DDP301"), ("1", "DDP301")]
            else:
                assert status == 0, printed[-3000:]
                assert errors == []
                took = re.findall(r"rank (\d) took (\d+) steps", printed)
                assert sorted(took) == [("0", "16"), ("1", "16")]
                assert {r.steps for r in report.ranks} == {16}
