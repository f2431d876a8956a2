"""The debug level that the doctor sets makes torch print nothing more."""

import importlib
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from ddpdoctor.events import NotObserved
from ddpdoctor.probe.collectives.process_groups import _init_entered
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.debug_level import DebugLevel
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.storage.run_folder import EventWriter, Lines

dist: Any = importlib.import_module("torch.distributed")
OFF, INFO = dist.DebugLevel.OFF, dist.DebugLevel.INFO


@pytest.fixture(params=["INFO", None])
def set_by_us(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    level = dist.get_debug_level()
    mine = Recorder(
        EventWriter(tmp_path / "r.jsonl"), tmp_path, "r", {"debug_level": request.param}
    )
    dist.set_debug_level(INFO)
    monkeypatch.setattr(recorder.current, "recorder", mine)
    DebugLevel.begin()
    yield request.param is not None
    patching.restore()
    dist.set_debug_level(level)


def asked_in(module: str) -> Any:
    def ask() -> Any:
        return dist.get_debug_level()

    return FunctionType(ask.__code__, {"__name__": module, "dist": dist})()


def test_who_prints_at_it_is_not_told(set_by_us: bool) -> None:
    assert asked_in("torch.distributed.fsdp._flat_param") == (OFF if set_by_us else INFO)
    assert asked_in("__main__") == INFO
    assert dist.get_debug_level() == INFO


def test_a_level_of_the_program_is_its_own(set_by_us: bool) -> None:
    dist.set_debug_level(INFO)
    assert asked_in("torch.distributed.fsdp._flat_param") == INFO


@pytest.mark.parametrize(("backend", "left"), [("nccl", "DETAIL"), ("gloo", "INFO"), ("", "INFO")])
def test_detail_is_left_to_nccl(
    backend: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--debug-level detail` on a machine with GPUs: with gloo DDP would crash."""
    level = dist.get_debug_level()
    mine = Recorder(EventWriter(tmp_path / "r.jsonl"), tmp_path, "r", {"debug_level": "DETAIL"})
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    monkeypatch.setattr(recorder.current, "recorder", mine)
    DebugLevel.begin()
    try:
        _init_entered(mine, (backend,) if backend else (), {})
        assert dist.get_debug_level().name == left
        assert (asked_in("torch.distributed.fsdp._flat_param") == OFF) is (left == "INFO")
    finally:
        patching.restore()
        dist.set_debug_level(level)
    told = [e for e in Lines(mine.writer.path).events() if isinstance(e, NotObserved)]
    assert [e.check for e in told] == ["collective-mismatch"] * (left == "INFO")
