"""One iterator of a loader for all epochs: how often its sampler began the same order anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.events import EpochEnded
from ddpdoctor.probe import data, moments, patching
from ddpdoctor.probe.recorder import Recorder, set_recorder
from ddpdoctor.runfolder import EventWriter, Lines

torch = pytest.importorskip("torch")
utils = torch.utils.data


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    data.install()
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    active = Recorder(writer, tmp_path, "rank-0", {})
    set_recorder(active)
    yield active
    set_recorder(None)
    patching.restore()
    moments.forget()
    writer.close()


class Again:
    """Of a batch sampler or sampler, without an end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def test_how_often_the_sampler_began_anew(recorder: Recorder, tmp_path: Path) -> None:
    values = utils.TensorDataset(torch.arange(32))

    def read(*, epochs: bool = False, look: bool = False, workers: int = 0) -> None:
        sampler = utils.DistributedSampler(values, num_replicas=2, rank=0)
        batches = Again(utils.BatchSampler(sampler, 4, False))
        loader = utils.DataLoader(values, batch_sampler=batches, num_workers=workers)
        iterator = iter(loader)
        for epoch in range(3):
            if epochs:
                sampler.set_epoch(epoch)
            for _ in range(4):
                next(iterator)
                if look and not epoch:
                    list(sampler)
        data._close_all(recorder, None)

    read()
    read(epochs=True)
    read(look=True)
    read(workers=1)
    recorder.writer.close()
    ends = [e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, EpochEnded)]
    assert [(e.batches, e.again) for e in ends] == [(12, 2), (12, 0), (12, 2), (12, 2)]
