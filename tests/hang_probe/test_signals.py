"""What the probe writes down of signals that the program sends."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.events import SignalSent
from ddpdoctor.probe.recording.patching import restore
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.probe.watchers.process import sent_signals
from ddpdoctor.probe.watchers.process.sent_signals import SentSignals
from ddpdoctor.storage.run_folder import EventWriter, Lines


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder = Recorder(writer, tmp_path, "rank-0", {})
    monkeypatch.setattr(current, "recorder", recorder)
    SentSignals.begin()
    yield recorder
    restore()
    writer.close()


def sent(recorder: Recorder) -> list[tuple[int, int]]:
    found = Lines(recorder.writer.path).events()
    return [(e.pid, e.signal) for e in found if isinstance(e, SignalSent)]


def test_a_signal_that_ends_the_process_is_told(recorder: Recorder) -> None:
    number = signal.SIGURG  # which does nothing by itself
    os.kill(os.getpid(), number)
    signal.raise_signal(number)
    assert sent(recorder) == [(os.getpid(), number)] * 2


def test_one_that_the_program_handles_is_not(recorder: Recorder) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        for _ in range(2 * sent_signals.MOST_EMITTED):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(seen) == 2 * sent_signals.MOST_EMITTED
    os.kill(os.getpid(), 0)
    assert sent(recorder) == []
    os.kill(os.getpid(), signal.SIGURG)
    assert len(sent(recorder)) == 1, "the others have not used up what may be told"


def test_each_line_that_starts_a_timer_is_told_once(recorder: Recorder) -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        for _ in range(3):
            signal.alarm(60)
            signal.alarm(0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 60.0, 5.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGALRM, lambda number, _: None)
        signal.alarm(60)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    own = os.getpid()
    assert sent(recorder) == [(own, signal.SIGALRM), (own, signal.SIGVTALRM)]


def test_the_functions_stay_what_they_are(recorder: Recorder) -> None:
    assert pickle.loads(pickle.dumps(os.kill)) is os.kill
    with pytest.raises(TypeError):
        os.kill(os.getpid())  # type: ignore[call-arg]
