"""A watcher that is called as in a run: when hooks fire."""

from __future__ import annotations

import pytest

from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.recording.watcher import Watcher


def alone(monkeypatch: pytest.MonkeyPatch, kind: type[Watcher]) -> None:
    """Have one watcher, made anew, be the only one that hooks call until the test ends."""
    for hook in hooks._every:
        for name in ("_every", "_enabled", "on_fast_path"):
            monkeypatch.setattr(hook, name, [])
    watcher = kind()
    monkeypatch.setattr(kind, "current", watcher)
    watcher.subscribe()
