"""What the probe records of a loader: whose order it reads in, and what its data is part of."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from ddpdoctor.analysis.data.parts import selected
from ddpdoctor.events import Event, LoaderSeen, Site
from ddpdoctor.events.pack import unpack
from ddpdoctor.probe.recording.code_locations import Sites
from ddpdoctor.probe.watchers.data import dataset_parts
from ddpdoctor.probe.watchers.data.dataset_parts import DatasetParts
from ddpdoctor.probe.watchers.data.samplers import (
    MadeOf,
    epoch_of,
    innermost,
    loader_seen,
    note_line,
    only_line,
    orders,
)

torch = pytest.importorskip("torch")
data = torch.utils.data


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    DatasetParts.renew()
    yield
    DatasetParts.renew()


def seen(loader: Any) -> LoaderSeen:
    looked = MadeOf(
        dataset_parts.payloads(loader.dataset), DatasetParts.current.layers(loader.dataset)
    )
    return loader_seen(
        loader, innermost(loader), number=0, made=(-1, 0), loop=-1, sampler_site=-1, made_of=looked
    )


def test_a_subset_of_a_subset_names_the_data_set_beneath() -> None:
    photos = data.TensorDataset(torch.arange(20))
    part = data.Subset(photos, range(10, 20))
    rest = data.Subset(part, [9])
    whole, inner, outer = (seen(data.DataLoader(d)).layers for d in (photos, part, rest))
    assert [layer.data for layer in outer] == [outer[0].data, inner[0].data, whole[0].data]
    assert len({layer.data for layer in outer}) == 3
    assert [unpack(layer.indices) for layer in outer] == [[9], [], []]
    assert [layer.regular for layer in outer] == [(0, 0, 0), (10, 1, 10), (0, 0, 0)]
    assert [layer.length for layer in outer] == [1, 10, 20]


def test_what_a_subset_selects() -> None:
    photos = data.TensorDataset(torch.arange(40000))
    for chosen in ([5, 3, 1], range(2, 40000, 3), torch.tensor([1, 2, 4]), numpy.arange(3), [7, 7]):
        (layer, _) = seen(data.DataLoader(data.Subset(photos, chosen))).layers  # type: ignore[arg-type]
        assert list(selected(layer)) == list(map(int, chosen))


def test_batches_that_a_class_of_the_user_s_makes_up() -> None:
    class Pairs(data.BatchSampler):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2]])

    photos = data.TensorDataset(torch.arange(20))
    own = Pairs(data.SequentialSampler(photos), 2, False)
    assert seen(data.DataLoader(photos, batch_sampler=own)).batch_sampler == "Pairs"
    assert seen(data.DataLoader(photos, batch_size=4)).batch_sampler == ""
    assert seen(data.DataLoader(photos, batch_size=None)).batch_sampler == ""


def test_batches_that_are_given() -> None:
    photos = data.TensorDataset(torch.arange(20))
    batches = data.BatchSampler(data.SequentialSampler(photos), 8, drop_last=True)
    given, made = (seen(data.DataLoader(photos, **how)) for how in (
        {"batch_sampler": batches}, {"batch_size": 8, "drop_last": True},
    ))  # fmt: skip
    assert (given.batch_size, given.drop_last, given.batches_given) == (8, True, True)
    assert (made.batch_size, made.drop_last, made.batches_given) == (8, True, False)
    assert seen(data.DataLoader(photos, batch_sampler=[[0, 1]])).batch_size is None
    assert seen(data.DataLoader(photos, batch_size=None)).batch_size is None


def test_a_list_has_no_number() -> None:
    assert seen(data.DataLoader([1, 2, 3])).layers[0].data == -1


def test_what_is_filled_while_samples_are_read_is_not_compared() -> None:
    class Cached(data.Dataset):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.paths = ["a.txt", "b.txt", "c.txt"]
            self.texts: list[str | None] = [None] * 3

        def __len__(self) -> int:
            return 3

    photos = Cached()
    photos.texts[1] = "read"
    assert [p.name for p in seen(data.DataLoader(photos)).payloads] == ["paths"]


class Quiet(data.DistributedSampler):  # type: ignore[misc,name-defined]
    def __init__(self, dataset: object) -> None:
        super().__init__(dataset, num_replicas=2, rank=0)


class Repeating(Quiet):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 0, 1])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("kind", "own", "length"), [(None, False, 9), (Quiet, False, 5), (Repeating, True, 3)]
)
def test_whose_code_chooses_the_indices(kind: type | None, own: bool, length: int) -> None:
    photos = data.TensorDataset(torch.arange(9))
    found = seen(data.DataLoader(photos, batch_size=2, sampler=kind and kind(photos)))
    assert (found.own_order, found.sampler_length) == (own, length)


class Fixed(Repeating):
    """Takes the epoch for the sake of the loop that sets it."""


class ByEpoch(Repeating):
    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    @property
    def _order(self) -> list[int]:
        return [i for i in range(3) if i != self.epoch]


class Renamed(Quiet):
    """Keeps the epoch under another name, beside where it goes on."""

    _epoch = start = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self.start = epoch, 0

    def __iter__(self) -> Iterator[int]:
        return iter([self._epoch, 1][self.start :])


class Resumed(Renamed):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1][self.start :])


class Seeded(data.Sampler):  # type: ignore[misc,name-defined]
    """Is told the epoch by its attribute."""

    epoch = 0

    def __init__(self, dataset: object) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(9, generator=generator).tolist())


class Counted(Seeded):
    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch])


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Quiet, ""), (Fixed, ""), (ByEpoch, "epoch"), (Renamed, "_epoch"), (Resumed, ""),
     (Seeded, "epoch"), (Counted, "")],
)  # fmt: skip
def test_an_order_that_goes_by_the_epoch(kind: type, name: str) -> None:
    photos = data.TensorDataset(torch.arange(9))
    sampler = kind(photos)
    found = seen(data.DataLoader(photos, sampler=sampler))
    assert (found.epoch_name, found.by_epoch) == (name, bool(name))
    if name:
        setattr(sampler, name, 7)
        assert epoch_of(sampler) == 7


def two_lines(sampler: object) -> object:
    if isinstance(sampler, Repeating):
        return sampler
    return Repeating(sampler)


def test_the_line_that_names_the_class_of_a_sampler() -> None:
    events: list[Event] = []
    recorder = SimpleNamespace(sites=Sites(events.append))
    photos = data.TensorDataset(torch.arange(9))
    sampler = Fixed(photos)
    note_line(recorder, sampler, made := {})  # type: ignore[arg-type, var-annotated]
    note_line(recorder, data.SequentialSampler(photos), made)  # type: ignore[arg-type]
    (site,) = events
    assert isinstance(site, Site) and site.text.strip() == "sampler = Fixed(photos)"
    assert made == {sampler: (site.id, 0)}
    assert only_line(two_lines.__code__, "Repeating") is None


class Stream(data.IterableDataset):  # type: ignore[misc,name-defined]
    def __init__(self, epoch: Any = 0, **more: Any) -> None:
        self.epoch = epoch
        vars(self).update(more)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([int(self.epoch)])


class Mapped(data.IterableDataset):  # type: ignore[misc,name-defined]
    def __init__(self, source: Stream) -> None:
        self.source = source

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return map(abs, self.source)


def test_the_epoch_of_a_stream() -> None:
    kept = {"num_workers": 2, "persistent_workers": True}
    plain, shared = Stream(3), Stream(torch.zeros(1, dtype=torch.long).share_memory_() + 4)
    for stream, number, copied in ((plain, 3, True), (Mapped(plain), 3, True), (shared, 4, False)):
        loader = data.DataLoader(stream, **kept)
        found = seen(loader)
        assert (found.by_epoch, found.epoch_name, found.sets_epoch) == (True, "epoch", True)
        assert found.epoch_copied is copied
        assert epoch_of(orders(loader)) == number
    assert not seen(data.DataLoader(plain)).epoch_copied
    assert seen(data.DataLoader(Stream(shuffle=False, shuffle_buffer=0))).shuffle is False
    assert seen(data.DataLoader(Stream(shuffle=True, shuffle_buffer=0))).shuffle is None
    assert not seen(data.DataLoader(Mapped([1]))).by_epoch  # type: ignore[arg-type]
    counter = multiprocessing.get_context("fork").Value("i", 5)
    assert epoch_of(Stream(counter)) == 5
    with counter.get_lock():
        assert epoch_of(Stream(counter)) == 5
