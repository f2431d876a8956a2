"""Which names a framework is asked to reduce is recorded once for each."""

from types import SimpleNamespace

import pytest

from ddpdoctor.events import ReducedMetric, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training import logged_metrics
from ddpdoctor.probe.training.logged_metrics import LOGGERS, LoggedMetrics
from ddpdoctor.storage.run_folder import EventWriter


class Module:
    def log(self, name, value, sync_dist=False, rank_zero_only=False):
        pass


@pytest.fixture
def names(tmp_path):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder.current.recorder = Recorder(writer, tmp_path, "rank-0", {})
    LoggedMetrics.begin()
    LoggedMetrics.current._watch(next(iter(LOGGERS)), SimpleNamespace(LightningModule=Module))

    def recorded():
        patching.restore()
        writer.close()
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return [e.name for e in map(decode, lines) if isinstance(e, ReducedMetric)]

    yield recorded
    patching.restore()
    recorder.current.recorder = None


def test_names_that_are_reduced(names):
    for _ in range(2):
        Module().log("loss", 1.0, sync_dist=True)
        Module().log("own", 1.0)
        Module().log("first", 1.0, sync_dist=True, rank_zero_only=True)
        Module().log("accuracy", 1.0, sync_dist=True)
    assert names() == ["loss", "accuracy"]


def test_more_names_than_are_recorded(names, monkeypatch):
    monkeypatch.setattr(logged_metrics, "NAMES_AT_MOST", 2)
    for name in ("a", "b", "c"):
        Module().log(name, 1.0, sync_dist=True)
    assert names() == ["a", "b", ""]
