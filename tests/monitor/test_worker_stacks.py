"""The stacks of a loader's workers, in the file of their rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.monitor import stall_detector
from ddpdoctor.storage import stack_dumps

OF_RANK = 'Stack (most recent call first):\n  File "/x/train.py", line 3 in main\n'
OF_WORKER = 'Stack (most recent call first):\n  File "/x/data.py", line 8 in read\n'


@pytest.mark.parametrize("ended", [False, True])
def test_what_follows_is_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    path = tmp_path / "rank-0.stacks.txt"
    path.write_text(OF_RANK)

    def answers(pid: int, signum: int) -> None:
        if ended:
            raise ProcessLookupError
        with path.open("a") as file:
            file.write(OF_WORKER)

    monkeypatch.setattr(stall_detector.os, "kill", answers)
    monkeypatch.setattr(stall_detector.system, "catches", lambda *_: True)
    monkeypatch.setattr(stall_detector.system, "has_open", lambda *_: True)
    rank = SimpleNamespace(path=tmp_path / "rank-0.jsonl")
    frames = stall_detector._worker_stack(rank, 7)  # type: ignore[arg-type]
    assert [f.function for f in frames] == ([] if ended else ["read"])
    with path.open("a") as file:
        file.write(OF_RANK.replace("main", "later"))
    every = stack_dumps.threads(path.read_text())
    assert [frames[0].function for frames in every] == ["main", "later"]
