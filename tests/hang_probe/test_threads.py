"""Only the outermost call of each thread is the program's, whatever other threads do meanwhile."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events import CallBlock, CallRun, Event
from ddpdoctor.probe.collectives import collectives
from ddpdoctor.probe.collectives.call_log import CallLog
from ddpdoctor.probe.collectives.collectives import KINDS, Collectives
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.storage.run_folder import EventWriter


def test_calls_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, str]] = []
    recorder = SimpleNamespace(disabled=lambda part: False, own_ns=0)
    monkeypatch.setattr(collectives, "current_recorder", lambda: recorder)
    monkeypatch.setattr(collectives, "mark", lambda *args: None)
    monkeypatch.setattr(collectives.call_hooks.waited, "fire", lambda *args: None)

    def reader(original: Any, kind: Any) -> Any:
        def read(recorder: Any, args: Any, kwargs: Any) -> None:
            logged.append((threading.current_thread().name, kind.op))

        return read

    monkeypatch.setattr(collectives, "_reader", reader)
    watcher = Collectives()
    entered, others_done = threading.Event(), threading.Event()
    broadcast = watcher._watched(lambda: None, KINDS["broadcast"])

    def objects() -> None:
        broadcast()
        entered.set()
        assert others_done.wait(10)
        broadcast()

    thread = threading.Thread(
        target=watcher._watched(objects, KINDS["broadcast_object_list"]), name="saver"
    )
    thread.start()
    assert entered.wait(10)

    def fails() -> None:
        raise RuntimeError("the other rank is gone")

    with suppress(RuntimeError):
        watcher._watched(fails, KINDS["all_reduce"])()
    others_done.set()
    thread.join(10)
    broadcast()
    assert logged == [
        ("saver", "broadcast_object_list"),
        ("MainThread", "all_reduce"),
        ("MainThread", "broadcast"),
    ]


def test_no_call_of_another_thread_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of calls end with the steps of the main thread."""
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    events: list[Event] = []
    monkeypatch.setattr(recorder, "emit", lambda event, **options: events.append(event))
    log = CallLog(recorder)
    calls, done = 20_000, threading.Event()

    def saver() -> None:
        for number in range(calls):
            log._log(1, number % 7, 0, 0.0)
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=saver)
        thread.start()
        step = 0
        while not done.is_set():
            log._log(0, 1, 0, 0.0)
            log.step_ended(step := step + 1, 0.0)
        thread.join(10)
    finally:
        sys.setswitchinterval(before)
    log.flush()
    blocks = {e.id: e.codes for e in events if isinstance(e, CallBlock)}
    runs = [e for e in events if isinstance(e, CallRun)]
    for group, made in ((0, step), (1, calls)):
        mine = [e for e in runs if e.group == group]
        assert sum(len(blocks[e.block]) // 2 * e.repeat for e in mine) == made
    order = [code for e in runs if e.group == 1 for code in blocks[e.block][::2] * e.repeat]
    assert order == [n % 7 for n in range(calls)]
