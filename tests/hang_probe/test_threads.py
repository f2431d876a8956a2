"""Only the outermost call of each thread is the program's, whatever other threads do meanwhile."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.probe.collectives import collectives
from ddpdoctor.probe.collectives.collectives import KINDS, Collectives


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
