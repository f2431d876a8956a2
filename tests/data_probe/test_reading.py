"""What the probe keeps of an iteration: everything, bounded, without touching anything."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.events import ContentRead, EpochEnded, Event, IndicesRead, RowsRead
from ddpdoctor.events.pack import pack_ascending, unpack, unpack_ascending
from ddpdoctor.probe.recording import rng_state
from ddpdoctor.probe.recording.index_sample import halvings, kept
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.tensors import limits, sample_digests
from ddpdoctor.probe.tensors.fingerprints import Fingerprints
from ddpdoctor.probe.tensors.sample_digests import begins, digest, digests_of_rows
from ddpdoctor.probe.watchers.data import iteration as reading_module
from ddpdoctor.probe.watchers.data.dataset_entries import settings
from ddpdoctor.probe.watchers.data.dataset_parts import listed, payloads
from ddpdoctor.probe.watchers.data.iteration import Iteration, LoaderLine
from ddpdoctor.storage.run_folder import EventWriter, Lines

torch = pytest.importorskip("torch")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    yield Recorder(writer, tmp_path, "rank-0", {})
    writer.close()


def recorded(recorder: Recorder) -> list[Event]:
    return list(Lines(recorder.writer.path).events())


def read(recorder: Recorder, batches: list[object], place: LoaderLine | None = None) -> Iteration:
    """A loader that delivers these batches of indices and runs dry."""
    reading = Iteration(0, 0, place or LoaderLine(), None)
    for given in batches:
        reading.given.append(given)
        reading.batches += 1
        if reading.batches >= reading.look_at:
            reading.examine(recorder, None, 0)
    reading.exhausted = True
    reading.close(recorder, -1, False)
    return reading


def indices(events: list[Event]) -> list[int]:
    return [
        i for e in events if isinstance(e, (IndicesRead, EpochEnded))
        for i in unpack_ascending(e.indices)
    ]  # fmt: skip


@pytest.mark.parametrize("numbers", [[], [5], [3, 3, 1], [10**12, -7], list(range(1000))])
@pytest.mark.parametrize("with_numpy", [True, False])
def test_packing_keeps_every_number(
    numbers: list[int], with_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    with monkeypatch.context() as patched:
        if not with_numpy:
            patched.delitem(sys.modules, "numpy", raising=False)
        text = pack_ascending(array("q", numbers))
    assert unpack_ascending(text).tolist() == sorted(numbers)


@pytest.mark.parametrize("text", ["x", "1:B:!", "1:Z:AAAA", "a:B:eJwDAAAAAAE="])
def test_what_was_not_packed_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        unpack_ascending(text)


def test_batches_of_every_kind(recorder: Recorder) -> None:
    read(recorder, [[0, 1], (2, 3), 4, torch.tensor(5), range(6, 8), torch.tensor([8])])
    assert indices(recorded(recorder)) == list(range(9))


def test_names_instead_of_numbers_are_told_apart(recorder: Recorder) -> None:
    read(recorder, [["a", "b"], ["a", ("c", 1)]])
    found = indices(recorded(recorder))
    assert len(found) == 4 and len(set(found)) == 3


def test_iterable_data_sets_have_no_indices(recorder: Recorder) -> None:
    reading = read(recorder, [[None, None], [None]])
    assert indices(recorded(recorder)) == []
    assert reading.samples == 3


def test_what_was_dispatched_but_not_delivered_does_not_count(recorder: Recorder) -> None:
    reading = Iteration(0, 0, LoaderLine(), None)
    reading.given += [[0, 1], [2, 3], [4, 5]]
    reading.batches = 1
    reading.close(recorder, -1, False)
    assert indices(recorded(recorder)) == [0, 1]


def test_beyond_the_cap_ranks_keep_the_same_subset(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "CAP", 1000)
    monkeypatch.setattr(reading_module, "CHUNK", 256)
    order = random.Random(0).sample(range(8000), 8000)
    read(recorder, [order[n : n + 64] for n in range(0, 8000, 64)])
    events = recorded(recorder)
    coarsest = max(e.sampled for e in events if isinstance(e, (IndicesRead, EpochEnded)))
    assert coarsest == 8
    subset = {i for i in range(8000) if kept(i, 3)}
    assert subset <= set(indices(events))
    assert len(indices(events)) < 5000
    assert 0.8 < len(subset) / 1000 < 1.2
    assert {i % 2 for i in subset} == {0, 1}  # strided shares are thinned alike


def test_thinning_depends_on_counts_only() -> None:
    assert [halvings(n, 100) for n in (0, 99, 100, 199, 200, 399, 400)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_rank_that_is_killed_keeps_all_but_the_last_piece(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "CHUNK", 64)
    reading = Iteration(0, 0, LoaderLine(), None)
    for n in range(0, 1000, 4):
        reading.given.append([n, n + 1, n + 2, n + 3])
        reading.batches += 1
        if reading.batches >= reading.look_at:
            reading.examine(recorder, None, 0)
    assert len(indices(recorded(recorder))) >= 700  # and nobody called close()
    assert len(reading.given) < 100


def test_generators_are_read_without_being_advanced() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    first = rng_state.positions()
    assert rng_state.positions() == first
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("count", [1, 4, 100, 700])
def test_how_many_numbers_were_drawn(count: int) -> None:
    torch.manual_seed(3)
    torch.rand(3)
    before = rng_state.positions()
    for _ in range(count):
        torch.randint(10, (1,))
    assert rng_state.drawn(before, rng_state.positions()) == count


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 8, 8),
        torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(4, 100).to(torch.bfloat16),
        torch.randn(8, 100)[2:6],
        torch.arange(4),
        torch.nn.Parameter(torch.randn(4, 5)),
    ],
)
def test_rows_are_told_apart_and_recognised(tensor: torch.Tensor) -> None:
    digests = [digest(tensor, row) for row in range(4)]
    assert len(set(digests)) == 4 and all(any(d) for d in digests)
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    assert [digest(copy, row) for row in range(4)] == digests


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.randn(4, 3, device="meta"),
        torch.eye(4).to_sparse(),
        torch.randn(1, 3).expand(4, 3),
    ],
)
def test_what_lies_in_another_way_is_left_alone(tensor: torch.Tensor) -> None:
    assert digest(tensor, 0) == (0, 0) or tensor.shape[0] == 1


def test_a_tensor_that_was_looked_at_can_still_be_resized() -> None:
    tensor = torch.arange(8)
    digest(tensor, 3)
    tensor.resize_(100)


def test_padding_does_not_hide_a_text() -> None:
    short = torch.tensor([[5, 6, 7, 0], [1, 2, 3, 4]])
    long = torch.tensor([[5, 6, 7, 0, 0, 0, 0], [9, 9, 9, 9, 9, 9, 8]])
    assert digest(short, 0)[1] == digest(long, 0)[1]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(4.0), torch.arange(4)],
        {"x": torch.arange(4.0), "label": ["a", "b", "c", "d"]},
        (["a", "b", "c", "d"], {"y": torch.arange(4)}),
        ([torch.arange(n + 1) for n in range(4)], [1, 2, 3, 4]),
        [{"n": n} for n in range(4)],
    ],
)
def test_samples_of_batches_of_every_shape(recorder: Recorder, batch: object) -> None:
    prints = Fingerprints(100, 4, iterable=False)
    prints.take(0, [10, 11, 12, 13], batch)
    prints.write(recorder, 0, 0)
    (read,) = [e for e in recorded(recorder) if isinstance(e, ContentRead)]
    assert unpack(read.indices) == [10, 11, 12, 13]
    assert any(len(set(unpack(c))) == 4 for c in read.columns)


def test_what_a_data_set_indexes() -> None:
    data = torch.utils.data
    base = data.TensorDataset(torch.randn(20, 3), torch.arange(20))
    split = data.Subset(base, [3, 1, 2])
    found = {p.name: p for p in payloads(split)}
    assert found["indices"].kind == "indices" and not found["indices"].ascending
    assert found["dataset.tensors[0]"].length == 20
    other = payloads(data.Subset(base, [1, 2, 3]))
    assert {p.name: p.content for p in other}["indices"] == found["indices"].content
    assert {p.name: p.order for p in other}["indices"] != found["indices"].order
    (files,) = payloads(_Files())
    assert (files.name, files.kind) == ("paths", "text")
    assert len(payloads(data.ConcatDataset([base, split]))) == 5
    assert payloads([])[0].length == 0 and payloads(None) == ()


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, files: list[object], inner: object = None) -> None:
        self.files, self.inner, self.names = files, inner, ["x", "x"]
        self.sizes = [1, 2]

    def __iter__(self) -> Any:
        return iter(self.files)


def test_the_lists_that_a_stream_holds() -> None:
    files: list[object] = [Path("a.tar"), "b.tar", "c.tar"]
    (one,) = listed(_Stream(list(files)))
    assert (one.name, one.length, len(unpack(one.pieces))) == ("files", 3, 3)
    inside, outside = listed(_Stream(["only"], _Stream([str(f) for f in files]))), one
    assert [p.name for p in inside] == ["inner.files"]
    assert inside[0].pieces == outside.pieces
    assert not listed(_Stream(["only"]))


class _Named(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, files: list[object]) -> None:
        self.files, self.labels, self.classes = files, ["a"] * len(files), ["a", "b"]

    def __len__(self) -> int:
        return len(self.files)


def test_the_lists_with_a_text_for_each_sample() -> None:
    files: list[object] = ["a.png", "b.png", "c.png"]
    (one,) = listed(_Named(files))
    assert (one.name, one.length) == ("files", 3)
    (pairs,) = listed(torch.utils.data.Subset(_Named([(f, 0) for f in files]), [0]))
    assert pairs.pieces == one.pieces
    assert not listed(_Named([1, 2, 3]))
    assert not listed(torch.utils.data.TensorDataset(torch.ones(3)))


class _Views(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Entries by their index, by a random one, and labels that do not tell samples apart."""

    shared = torch.arange(40.0)
    noise: Any = None

    def __init__(self, root: str = "a") -> None:
        self.root = Path(root)
        self.x, self.drawn, self.labels = torch.randn(40), torch.randn(40), torch.arange(40.0) % 4

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        other = random.randrange(len(self))
        noise = self.noise.drawn[index]
        return self.x[index] + self.shared[index] + noise, self.drawn[other], self.labels[index]


class _Redrawn(_Views):
    def __getitem__(self, index: int) -> Any:
        index = random.randrange(len(self))
        return self.x[index]


def test_entries_that_tell_samples() -> None:
    def telling(dataset: Any) -> set[str]:
        return {p.name for p in payloads(dataset) if p.tells}

    assert telling(_Views()) == {"x", "shared"}
    part = torch.utils.data.Subset(_Views(), range(1, 30))
    assert telling(part) == {"dataset.x", "dataset.shared"}
    assert not telling(_Redrawn())
    assert settings(part) == settings(torch.utils.data.Subset(_Views(), [1, 2]))
    assert settings(_Views()) != settings(_Views("b"))
    long = _Views()
    long.number, long.text = 10**5000, "a" * 10**8  # type: ignore[attr-defined]
    began = time.perf_counter()
    assert settings(long) != settings(_Views())
    assert time.perf_counter() - began < 0.05


def kind_of(values: Any) -> str:
    (found,) = payloads(values) if isinstance(values, list) else payloads(_Column(values))
    return found.kind


def test_whole_numbers_that_select_samples() -> None:
    drawn = random.Random(0)
    ids = drawn.sample(range(400), 64)
    assert {kind_of(ids), kind_of(torch.tensor(ids)), kind_of([*torch.tensor(ids).numpy()])} == {
        "choice"
    }


def test_lists_and_arrays_of_anything() -> None:
    np = pytest.importorskip("numpy")
    rows = [np.arange(3.0) + n for n in range(8)]
    assert kind_of(rows) == "tensor"
    assert kind_of([{"x": r, "y": r[:1]} for r in rows]) == "tensor"
    assert kind_of([np.array(n) for n in range(1, 9)]) == "tensor"
    files = np.array([f"{n}.png" for n in range(8)], dtype=object)
    ragged = np.empty(8, dtype=object)
    ragged[:] = [np.arange(n + 1) for n in range(8)]
    assert [kind_of(files), kind_of(ragged), kind_of(np.stack([files, files], 1))] == [
        "text", "tensor", "tensor",
    ]  # fmt: skip
    again = np.array([f"{n}.png" for n in range(8)], dtype=object)
    for one, other in ((files, again), (np.stack([files], 1), np.stack([again], 1))):
        same = [next(iter(payloads(_Column(v)))) for v in (one, other)]
        assert same[0].order == same[1].order, "no addresses"
    assert not payloads(_Column([object() for _ in range(8)]))


def test_numbers_that_do_not() -> None:
    drawn = random.Random(0)
    assert kind_of([drawn.randrange(10) for _ in range(64)]) == "other", "labels"
    assert kind_of(drawn.sample(range(10**6), 64)) == "other", "no two alike by chance"
    assert kind_of([drawn.random() for _ in range(64)]) == "other"
    assert kind_of(torch.randn(64)) == "tensor"
    assert kind_of(torch.arange(64.0)) == "tensor"


class _Column(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)


class _Files(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.paths = [(f"/data/{n}.png", n % 2) for n in range(5)]
        self.root = "/data"

    def __len__(self) -> int:
        return 5


def test_rows_of_batches_that_a_stream_made_itself(recorder: Recorder) -> None:
    values = torch.arange(12).float().reshape(4, 3)
    labels = torch.tensor([1, 1, 0, 1])
    prints = Fingerprints(-1, None, iterable=True)
    for number in range(3):
        prints.take(number, None, (labels, values + number))
    prints.write(recorder, 0, 0)
    (read,) = [e for e in recorded(recorder) if isinstance(e, RowsRead)]
    assert unpack(read.batches) == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(unpack(read.rows))) == 12
    again = Fingerprints(-1, None, iterable=True)
    again.take(0, None, {"rows": values.flip(0).clone()})
    assert [*again.rows] == [n & 0xFFFFFFFF for n in unpack(read.rows)[3::-1]]
    again.take(1, None, torch.ones(5000, 2))
    again.take(2, None, torch.ones(4, 2))
    assert len(again.rows) == 4, "more than are looked at"


def test_the_size_of_inputs_is_that_of_all_their_parts() -> None:
    image, boxes = torch.zeros(3, 4, 4), torch.zeros(0, 4)
    samples = [{"id": n, "image": image, "boxes": boxes} for n in range(40)]
    assert sample_digests.samples((samples,)) == 40
    assert sample_digests.size_of((samples,)) == 40 * 48
    tokens = torch.zeros(8, 5)
    assert sample_digests.samples(([tokens, tokens], 1)) == 8
    assert sample_digests.size_of(([tokens, tokens], {"labels": tokens}, tokens, 1)) == 160
    assert sample_digests.size_of(([image] * limits.LEAVES,)) == 0


def test_where_an_input_begins_in_the_batch_that_it_is_a_slice_of() -> None:
    batch = torch.zeros(16, 5)
    assert begins((batch[8:], batch)) == 8
    assert begins(batch.chunk(4)[3]) == 12
    assert not begins(batch) and not begins(batch[:, 2:]) and not begins((None, "text"))


def test_which_loader_delivered_what_a_model_is_given(recorder: Recorder) -> None:
    batches = [[torch.ones(4, 2), torch.ones(4)] for _ in range(2)]
    readings = [Iteration(number, 0, LoaderLine(), None) for number in (7, 8)]
    for reading, batch in zip(readings, batches, strict=True):
        reading.batches += 1
        reading.examine(recorder, batch, 0)
    own, half = batches[0][0], batches[1][0][:2]
    assert reading_module.delivered_by(sample_digests.memories(own)) == (7,)
    assert reading_module.delivered_by(sample_digests.memories([half, own])) == (7, 8)
    assert reading_module.delivered_by(sample_digests.memories(own.clone())) == ()
    readings[0].batches += 1  # delivered, and not looked at: the memory may be another's by now
    assert reading_module.delivered_by(sample_digests.memories(own)) == ()
    for reading in readings:
        reading.close(recorder, 0, False)
    assert reading_module.delivered_by(sample_digests.memories(half)) == ()


def test_which_parts_of_a_batch_are_labels(recorder: Recorder) -> None:
    batch = {
        "input": torch.rand(4, 3), "label": torch.arange(4), "tokens": torch.ones(4, 99).long(),
    }  # fmt: skip
    prints = Fingerprints(8, 4, iterable=False)
    prints.take(0, [5, 6, 7, 4], batch)
    prints.take(1, [0, 1, 2, 3], batch)
    prints.write(recorder, 0, 0)
    prints.take(2, [5, 6, 7, 4], [torch.rand(4, 3), [1, 2, 3, 4], ["a", "b", "c", "d"]])
    prints.write(recorder, 0, 1)
    whole, lists = (e for e in recorded(recorder) if isinstance(e, ContentRead))
    assert len(whole.numbers) == len(whole.columns)
    assert whole.numbers.rstrip("-") == "-n"
    assert lists.numbers == "-n-"


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(40.0).reshape(10, 4),
        torch.arange(40).reshape(10, 4) % 7,
        torch.arange(40.0).reshape(4, 10).T,
        torch.arange(80.0).reshape(20, 4)[::2],
        torch.arange(10),
        torch.arange(40).reshape(10, 4).numpy(),
    ],
)
def test_digests_of_rows_are_those_of_each(values):
    rows = range(0, 10, 3)
    assert list(digests_of_rows(values, rows)) == [digest(values, n) for n in rows]


def test_parts_of_the_entries_that_are_the_same() -> None:
    """Two data sets that differ in their last entries, and some that are too short to be cut."""
    torch.manual_seed(0)
    values = torch.randn(192, 3)
    other = torch.cat([values[:160], torch.randn(32, 3)])
    (one,), (two,) = payloads(_Column(values)), payloads(_Column(other))
    same = [a == b for a, b in zip(unpack(one.pieces), unpack(two.pieces), strict=True)]
    assert same == [True] * 13 + [False] * 3
    assert not next(iter(payloads(_Column(values[:20])))).pieces
