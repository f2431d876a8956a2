"""The monitor of a decorated run, without one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ddpdoctor.embedded.monitor_process import Orders, Watcher
from ddpdoctor.monitor.stall_detector import StallDetector


class Stalled:
    """A monitor that has something to say at its first look, and never again."""

    watched = ()
    ranks_wait = False
    run = None

    def __init__(self, standing: StallDetector, reason: str | None) -> None:
        self.stall_detector = standing
        self.reason = reason

    def start(self) -> None:
        self.stall_detector.notices.append("no progress for 12 s (suspected): rank 1 does not come")

    def tick(self) -> str | None:
        return self.reason

    def stopped(self, by: str, reason: str) -> None:
        pass

    def rank_pids(self) -> set[int]:
        return set()

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("reason", [None, "a deadlock"])
def test_a_stall_is_told_while_the_run_goes_on(
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    orders = Orders(str(tmp_path), {}, 0, launcher=1, local_size=2, owns_info=False,
                    more_attempts=False)  # fmt: skip
    watcher = Watcher(orders)
    looks = iter([False, False, True])
    monkeypatch.setattr(watcher, "monitor", Stalled(watcher.monitor.stall_detector, reason))
    monkeypatch.setattr(watcher, "_over", lambda: next(looks))
    monkeypatch.setattr(watcher, "_report", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    watcher.run()
    told = ["ddpdoctor: no progress for 12 s (suspected): rank 1 does not come"]
    assert capsys.readouterr().err.splitlines() == told + (
        [f"ddpdoctor: stopping the run: {reason}"] if reason else []
    )
