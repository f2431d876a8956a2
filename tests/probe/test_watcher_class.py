"""What CONTRIBUTING says of a new watcher, done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddpdoctor.events import Clipped, ProbeCost, ProbeTrouble  # noqa: E402
from ddpdoctor.probe.recording import hooks, patching, recorder  # noqa: E402
from ddpdoctor.probe.recording.hooks import Hook, Subscriptions  # noqa: E402
from ddpdoctor.probe.recording.recorder import Recorder  # noqa: E402
from ddpdoctor.probe.recording.watcher import Watcher, on  # noqa: E402
from ddpdoctor.storage.run_folder import EventWriter, Lines  # noqa: E402

begins: Hook[int] = Hook("begins")
ends: Hook[int] = Hook("ends")


class Steps(Watcher):
    lost = "which schedulers were stepped"

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.following = Subscriptions()

    def install(self) -> None:
        self.around(torch.optim.lr_scheduler.LRScheduler, "step", before=self._stepped)

    def _stepped(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append("stepped")
        recorder.emit(Clipped(at=1.0, function="step", step=0, call=0, site=-1))

    @on(begins)
    @on(ends, during="following", fast_path=False)
    def _called(self, recorder: Recorder, moment: int) -> None:
        self.seen.append(moment)

    @on(ends, lost="the ends")
    def _fails(self, recorder: Recorder, moment: int) -> None:
        raise RuntimeError("broken")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "rank-0.jsonl"
    monkeypatch.setattr(
        recorder.current, "recorder", Recorder(EventWriter(path), tmp_path, "rank-0", {})
    )
    yield path
    patching.restore()
    for hook in (begins, ends):
        hook.clear()


def test_a_watcher_sees_calls_and_moments(folder: Path) -> None:
    Steps.begin()
    active: Any = recorder.current.recorder
    begins.fire(active, 1)
    ends.fire(active, 2)
    Steps.current.following.enable()
    ends.fire(active, 3)
    ends.fire_fast(active, 4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert Steps.current.seen == [1, 3, "stepped"], "its constructor steps once"
    events = [e for e in Lines(folder).events() if not isinstance(e, ProbeCost)]
    assert [type(e) for e in events] == [ProbeTrouble, Clipped]
    assert isinstance(events[0], ProbeTrouble) and events[0].lost == "the ends"
    assert events[0].part == "test_watcher_class.fails"


def test_each_run_has_a_watcher_of_its_own(folder: Path) -> None:
    Steps.begin()
    first = Steps.current
    first.seen.append("of the first run")
    hooks.forget()
    patching.restore()
    Steps.begin()
    begins.fire(SimpleNamespace(), 1)  # type: ignore[arg-type]
    assert Steps.current is not first
    assert Steps.current.seen == [1]
    assert first.seen == ["of the first run"]
