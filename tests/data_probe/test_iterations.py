"""What the probe records of one iterator for all epochs, and of loaders that are made anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.analysis.data.loaders import in_order
from ddpdoctor.events import EpochBegan, EpochEnded, LoaderSeen, ProbeTrouble
from ddpdoctor.probe.recording import hooks, patching
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.probe.watchers.data import loaders
from ddpdoctor.probe.watchers.data.loaders import Loaders
from ddpdoctor.storage.run_folder import EventWriter, Lines

torch = pytest.importorskip("torch")
utils = torch.utils.data


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    Loaders.begin()
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder = Recorder(writer, tmp_path, "rank-0", {})
    set_recorder(recorder)
    yield recorder
    set_recorder(None)
    patching.restore()
    hooks.forget()
    writer.close()


class Calls:
    """Of a recorder, with so many calls of two groups."""

    def counts(self) -> tuple[int, ...]:
        return 0, 7, 3, 2


def test_how_many_collectives_were_called_before(recorder: Recorder, tmp_path: Path) -> None:
    recorder.call_log = Calls()
    list(utils.DataLoader(utils.TensorDataset(torch.arange(4))))
    recorder.call_log = None
    recorder.writer.close()
    (began,) = (e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, EpochBegan))
    assert began.calls == (0, 7, 3, 2)


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
        Loaders.current._close_all(recorder, None)

    read()
    read(epochs=True)
    read(look=True)
    read(workers=1)
    recorder.writer.close()
    ends = [e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, EpochEnded)]
    assert [(e.batches, e.again) for e in ends] == [(12, 2), (12, 0), (12, 2), (12, 2)]


def test_data_sets_of_loaders_that_are_made_anew_are_looked_at_now_and_then(
    recorder: Recorder, tmp_path: Path
) -> None:
    for _ in range(128):
        values = utils.Subset(utils.TensorDataset(torch.arange(9)), range(4))
        list(utils.DataLoader(values, batch_size=4))
    recorder.writer.close()
    seen = [e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, LoaderSeen)]
    looked = [e.loader for e in seen if e.payloads]
    assert looked[: loaders.IDENTIFIED] == list(range(loaders.IDENTIFIED))
    for begin in (8, 16, 32, 64):
        assert 2 <= sum(begin <= n < 2 * begin for n in looked) <= 6


def test_a_data_set_that_cannot_be_looked_into(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(dataset: object) -> None:
        raise TypeError("unhashable type")

    monkeypatch.setattr(loaders.samplers.dataset_parts, "payloads", broken)
    list(utils.DataLoader(utils.TensorDataset(torch.arange(32)), 8))
    Loaders.current._close_all(recorder, None)
    events = list(Lines(tmp_path / "rank-0.jsonl").events())
    (seen,) = (e for e in events if isinstance(e, LoaderSeen))
    (ended,) = (e for e in events if isinstance(e, EpochEnded))
    assert (seen.length, seen.payloads, ended.samples) == (32, (), 32)
    assert [e.lost for e in events if isinstance(e, ProbeTrouble)] == [loaders.LOST_ENTRIES]


def test_the_state_that_an_iteration_continues_from(recorder: Recorder, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    class Shards(utils.IterableDataset):  # type: ignore[misc,name-defined]
        def __init__(self, left: list[int]) -> None:
            self.left = left

        def __iter__(self) -> Iterator[int]:
            while self.left:
                yield self.left.pop(0)

        def state_dict(self) -> dict[str, Any]:
            return {"left": list(self.left)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.left = list(state["left"])

    loader = stateful(Shards([1, 2, 3, 4]), batch_size=1)
    next(iter(loader))
    state = loader.state_dict()
    for left in ([5, 6], [7, 8]):
        loader = stateful(Shards(left), batch_size=1)
        loader.load_state_dict(state)
        assert [int(x) for x in loader] == [2, 3, 4]
        list(loader)
    recorder.writer.close()
    events = [e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, EpochBegan)]
    assert [bool(e.restored) for e in events] == [False, True, False, True, False]
    assert events[1].restored == events[3].restored
    assert events[1].restored_over != events[3].restored_over


def test_a_sampler_that_yields_groups_of_samples(recorder: Recorder, tmp_path: Path) -> None:
    class Groups(utils.Dataset):  # type: ignore[type-arg,name-defined]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, indices: list[int]) -> Any:
            return torch.tensor(indices)

    list(utils.DataLoader(Groups(), batch_size=2, sampler=[[0, 5], [3, 1], [7, 2]]))
    recorder.writer.close()
    (end,) = [e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, EpochEnded)]
    assert (end.samples, end.head) == (6, (0, 5, 3, 1, 7, 2))


def test_how_often_the_indices_fall(recorder: Recorder, tmp_path: Path) -> None:
    values = utils.TensorDataset(torch.arange(64))
    padded = [*range(0, 64, 2), 0]
    for order in (padded, range(64), [*range(32, 64), *range(16), *range(16, 32, 3), 7]):
        list(utils.DataLoader(values, batch_size=4, sampler=order))
    recorder.writer.close()
    ends = [e for e in Lines(tmp_path / "rank-0.jsonl").events() if isinstance(e, EpochEnded)]
    assert [(e.falls, e.ascending, in_order(e)) for e in ends] == [
        (1, False, True),
        (0, True, True),
        (2, False, False),
    ]
