"""The time in which an iteration over a loader begins is spent on loading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.collectives.call_log import call_log_of
from ddpdoctor.probe.recording import hooks, patching
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.probe.recording.stopwatch import loading
from ddpdoctor.probe.training.phases import Phases
from ddpdoctor.storage.call_ring import Phase
from ddpdoctor.storage.run_folder import EventWriter

torch = pytest.importorskip("torch")
STARTS_S = 0.2


class SlowToStart(torch.utils.data.DataLoader):  # type: ignore[misc,name-defined]
    """Stands for workers that are spawned."""

    def _get_iterator(self) -> Any:
        time.sleep(STARTS_S)
        return super()._get_iterator()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    Phases.begin()
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder = Recorder(writer, tmp_path, "rank-0", {})
    set_recorder(recorder)
    yield recorder
    set_recorder(None)
    patching.restore()
    hooks.forget()
    writer.close()


def test_it_is_an_account_of_its_line_and_of_the_next_step(recorder: Recorder) -> None:
    log = call_log_of(recorder)
    assert log is not None
    loading.take_seconds()
    assert len(list(SlowToStart(range(4)))) == 4
    accounts = {a.phase: a for a in log.ring.accounts()[1]}
    # Without what the doctor takes meanwhile.
    assert accounts[Phase.DATA].own_s >= STARTS_S / 2
    assert accounts[Phase.DATA].site == recorder.sites.number(_code(), _line())
    assert loading.take_seconds() >= STARTS_S / 2


def _code() -> Any:
    return test_it_is_an_account_of_its_line_and_of_the_next_step.__code__


def _line() -> int:
    return _code().co_firstlineno + 4
