"""Random generators that stand alike on several ranks, and from which loading data draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...events import WorkerRandom
from .content import by_index, changed
from .loaders import Reader

NAMES = ("torch", "numpy", "random")

SEEDS = {
    "torch": "`torch.manual_seed(seed + rank)`",
    "numpy": "`np.random.seed(seed + rank)`",
    "random": "`random.seed(seed + rank)`",
}
BY_THEMSELVES = (
    "seed the workers from `torch.initial_seed() % 2**32`, which differs between ranks and "
    "workers, or add the rank to the seed that `worker_init_fn` or the data set sets"
)
OF_WORKERS = (
    "`torch.manual_seed(seed + rank)` after the model was made; a loader with a `generator=` "
    "of its own needs the rank added to that one's seed; a `worker_init_fn` must seed from "
    "`torch.initial_seed()`, not from the worker's number alone"
)


class EqualGenerators(NamedTuple):
    """What stands alike on all ranks while data is loaded.

    Attributes:
        names: of the generators that loading draws from; empty where only base seeds are known.
        workers: it is the worker processes that draw; alone: they seed themselves.
    """

    names: tuple[str, ...]
    workers: bool
    alone: bool

    @property
    def fix(self) -> str:
        if self.alone:
            return BY_THEMSELVES
        if self.workers:
            return OF_WORKERS
        return f"{' and '.join(SEEDS[n] for n in self.names)} after the model was made"


def in_step(readers: Sequence[Reader]) -> EqualGenerators | None:
    """None where nothing stands alike, or nothing is drawn from it."""
    peers = [noted(r) for r in readers]
    in_workers = all(peers)
    same_seed = _same_seed(readers)
    shared = tuple(
        name
        for n, name in enumerate(NAMES)
        if (_workers_in_step(peers, n) if in_workers else _in_step(readers, n))
    )
    guessed = not (shared or in_workers) and same_seed and all(_changes(r) for r in readers)
    if not shared and not guessed:
        return None
    return EqualGenerators(shared, in_workers or guessed, in_workers and not same_seed)


def noted(reader: Reader) -> dict[int, WorkerRandom]:
    """What the workers of the first epoch wrote down, by their number."""
    ended = reader.epochs[0].ended
    return {w.worker: w for w in ended.workers} if ended else {}


def _workers_in_step(peers: list[dict[int, WorkerRandom]], generator: int) -> bool:
    """Some worker of every rank has this generator alike, and loading advances it."""
    for number in set.intersection(*map(set, peers)):
        same = [workers[number] for workers in peers]
        states = {w.states[generator] for w in same}
        if len(states) == 1 and 0 not in states and all(NAMES[generator] in w.drawn for w in same):
            return True
    return False


def _in_step(readers: Sequence[Reader], generator: int) -> bool:
    """All ranks begin with this generator alike, and loading advances it on all of them."""
    begins = {r.epochs[0].began.random[generator] for r in readers}
    ends = [r.epochs[0].ended for r in readers]
    drew = all(e is not None and NAMES[generator] in e.drawn for e in ends)
    return len(begins) == 1 and 0 not in begins and drew


def _same_seed(readers: Sequence[Reader]) -> bool:
    seeds = {r.epochs[0].began.base_seed for r in readers}
    return len(seeds) == 1 and None not in seeds


def _changes(reader: Reader) -> bool:
    """The content of the same samples was another in the second epoch."""
    return len(reader.epochs) > 1 and changed(by_index(reader, 0), by_index(reader, 1))
