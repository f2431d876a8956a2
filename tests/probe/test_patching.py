"""Hooks around the methods of classes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.storage.run_folder import EventWriter


class Model:
    def state_dict(self, prefix: str = "") -> str:
        return prefix


def test_a_method_that_is_given_its_self_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    monkeypatch.setattr(current, "recorder", Recorder(writer, tmp_path, "rank-0", {}))
    seen: list[Any] = []
    patching.around(Model, "state_dict", before=lambda recorder, args, kwargs: seen.append(args[0]))
    try:
        model = Model()
        assert functools.partial(Model.state_dict, self=model)(prefix="a") == "a"
        assert seen == [model]
    finally:
        patching.restore()
        writer.close()
