"""Programs whose ranks are threads of one process, as torch's own tests have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdoctor.probe.bootstrap import activation
from ddpdoctor.probe.collectives import call_log
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.storage.run_folder import EventWriter

THREADS = 4


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    yield Recorder(writer, tmp_path, "rank-0", {})
    writer.close()


def at_once(work: Callable[[int], object]) -> None:
    together = threading.Barrier(THREADS)

    def run(rank: int) -> None:
        together.wait()
        work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_they_become_one_rank(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[int] = []

    def become(rank: int, world_size: int) -> None:
        became.append(rank)
        time.sleep(0.05)
        current.recorder = recorder

    monkeypatch.setattr(current, "recorder", None)
    monkeypatch.setattr(activation, "_become", become)
    at_once(lambda rank: activation.ensure_rank(rank, THREADS, None))
    assert len(became) == 1


def test_they_share_one_tape(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def make(recorder: Recorder) -> object:
        made.append(object())
        time.sleep(0.05)
        return made[-1]

    got: list[object] = []
    monkeypatch.setattr(call_log, "CallLog", make)
    at_once(lambda rank: got.append(call_log.call_log_of(recorder)))
    assert len(made) == 1
    assert got == made * THREADS
