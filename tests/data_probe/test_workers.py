"""Where the random generators stand in worker processes: real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ddpdoctor.events import WorkerRandom
from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.watchers.data.own_generators import OwnDraws, digest
from ddpdoctor.probe.watchers.data.worker_rng import WorkerRNG

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    WorkerRNG.begin()
    yield
    patching.restore()


def noted(load: object, init: object, *, seed: int, length: int = 12) -> tuple[WorkerRandom, ...]:
    class Photos(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> int:
            load(index)  # type: ignore[operator]
            return index

    loader = torch.utils.data.DataLoader(
        Photos(), batch_size=2, num_workers=2, worker_init_fn=init,
        generator=torch.Generator().manual_seed(seed), multiprocessing_context="fork",
    )  # fmt: skip
    notes = WorkerRNG.current.share(2)
    assert notes is not None
    assert sorted(i for batch in loader for i in batch.tolist()) == list(range(length))
    return notes.read()


def draws(_: int) -> None:
    random.random()


def test_what_seeds_them_alone_decides() -> None:
    ours, theirs = (noted(draws, random.seed, seed=rank) for rank in (1, 2))
    assert [w.worker for w in ours] == [0, 1]
    assert all(w.drawn == ("random",) for w in (*ours, *theirs))
    assert [w.states[2] for w in ours] == [w.states[2] for w in theirs]
    assert all(a.states[0] != b.states[0] for a, b in zip(ours, theirs, strict=True))


def test_nothing_is_drawn() -> None:
    assert all(w.drawn == () for w in noted(abs, random.seed, seed=1))


def test_a_data_set_that_seeds_itself_at_its_first_sample() -> None:
    def seeds(number: int) -> object:
        return lambda index: random.seed(number) if index in (0, 2) else random.random()

    ours, theirs = (noted(seeds(rank), lambda _: random.seed(0), seed=1) for rank in (1, 2))
    assert ours[0].states[2] != theirs[0].states[2]


def test_a_worker_without_a_batch_and_an_error_of_the_data_set() -> None:
    assert len(noted(draws, None, seed=1, length=2)) == 1
    message = ""
    try:
        noted(lambda i: 1 // i, None, seed=1)
    except ZeroDivisionError as error:  # to hold on to it would keep the workers
        message = str(error)
    assert "1 // i" in message and "ddpdoctor" not in message


def test_a_loader_without_workers_is_let_alone() -> None:
    WorkerRNG.current.share(2)
    loader = torch.utils.data.DataLoader(range(4))
    iterator = iter(loader)
    assert "fetch" not in vars(iterator._dataset_fetcher)


@pytest.mark.parametrize("throughout", [True, False])
def test_a_stream_is_shuffled_as_it_begins(throughout: bool) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Iterator[int]:
            random.seed(3)
            order = list(range(12))
            random.shuffle(order)
            for number in order:
                yield number + (int(random.random()) if throughout else 0)

    notes = WorkerRNG.current.share(2)
    assert notes is not None
    loader = torch.utils.data.DataLoader(
        Stream(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    assert sum(len(batch) for batch in loader) == 24
    assert all(w.drawn == (("random",) if throughout else ()) for w in notes.read())


def test_workers_that_are_not_watched_leave_the_notes_of_others() -> None:
    notes = WorkerRNG.current.share(2)
    assert notes is not None
    WorkerRNG.current.share(0)
    loader = torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork")
    assert len(list(loader)) == 8
    assert notes.read() == ()


def handed(dataset: object, **more: object) -> list[dict[str, int]]:
    """What is noted of the data set's generators in two epochs."""
    found = []
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=1, multiprocessing_context="fork", **more
    )
    for _ in range(2):
        notes = WorkerRNG.current.share(1, dataset)
        assert notes is not None
        assert len(list(loader)) > 0
        (worker,) = notes.read()
        found.append(worker.own)
    return found


class Shuffled(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
    def __init__(self, rng: object, order: object) -> None:
        self.rng, self.order = rng, order

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self.rng, 12)  # type: ignore[operator]


class Chained(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
    def __init__(self, parts: list[Shuffled]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[int]:
        for part in self.parts:
            yield from part


class Reseeded(Shuffled):
    def __iter__(self) -> Iterator[int]:
        self.rng.seed(3)
        return super().__iter__()


class MadeAnew(Shuffled):
    def __iter__(self) -> Iterator[int]:
        self.rng = random.Random(3)
        return super().__iter__()


def sampled(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(count), count)


def permuted(rng: object, count: int) -> list[int]:
    return rng.permutation(count).tolist()  # type: ignore[attr-defined]


def by_torch(rng: object, count: int) -> list[int]:
    return torch.randperm(count, generator=rng).tolist()


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("kind", ["python", "numpy", "numpy-new", "torch"])
def test_a_generator_that_a_stream_keeps(kind: str, chained: bool) -> None:
    numpy = pytest.importorskip("numpy")
    stream = {
        "python": lambda: Shuffled(random.Random(1), sampled),
        "numpy": lambda: Shuffled(numpy.random.RandomState(1), permuted),
        "numpy-new": lambda: Shuffled(numpy.random.default_rng(1), permuted),
        "torch": lambda: Shuffled(torch.Generator().manual_seed(1), by_torch),
    }[kind]()
    first, second = handed(Chained([stream]) if chained else stream)
    assert first == second and list(first) == ["Shuffled.rng"]


def test_generators_whose_copies_do_no_harm() -> None:
    assert handed(Shuffled(random.Random(1), lambda rng, count: range(count))) == [{}, {}]
    assert handed(Reseeded(random.Random(1), sampled)) == [{}, {}]
    assert handed(MadeAnew(random.Random(1), sampled)) == [{}, {}]
    stream = Shuffled(random.Random(1), sampled)

    def seeds(worker: int) -> None:
        torch.utils.data.get_worker_info().dataset.rng.seed(worker)

    assert handed(stream, worker_init_fn=seeds) == [{}, {}]
    before = handed(stream)[0]
    stream.rng.random()  # type: ignore[attr-defined]
    assert before and handed(stream)[0] != before


class Jitter:
    """A transform with a generator of its own, made with the first sample if `late`."""

    def __init__(self, late: bool) -> None:
        self.rng = None if late else random.Random(3)

    def __call__(self, index: int) -> float:
        self.rng = self.rng or random.Random(3)
        return index + self.rng.random()


class Jittered(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    def __init__(self, jitter: object) -> None:
        self.unused = random.Random(4)
        self.transforms = [jitter]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return self.transforms[0](index)  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("late", [False, True])
def test_generators_of_transforms(late: bool) -> None:
    notes = WorkerRNG.current.share(2)
    assert notes is not None
    data = Jittered(Jitter(late))
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    assert len(list(loader)) == 6
    first, second = notes.read()
    after = random.Random(3)
    for _ in range(2):
        after.random()
    assert first.kept == second.kept == {"Jitter.rng": digest(after)}


def test_generators_that_do_not_move() -> None:
    own = OwnDraws(Jittered(Jitter(late=False)))
    for _ in range(3):
        own.look()
    assert own.states == {}
