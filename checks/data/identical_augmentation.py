"""DDP510."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.events import WorkerRandom
from ddpdoctor.findings import Check, Finding, Severity
from ddpdoctor.run import Run

from ._content import by_index, changed
from ._loaders import Loader, Reader, loaders, partners
from ._words import no_loader, related, whom

NAMES = ("torch", "numpy", "random")

OF_PROCESS = (
    "`torch.manual_seed(seed + rank)` (numpy and `random` likewise) after the model was made"
)
BY_THEMSELVES = (
    "seed the workers from `torch.initial_seed() % 2**32`, which differs between ranks and "
    "workers, or add the rank to the seed that `worker_init_fn` or the data set sets"
)
OF_WORKERS = (
    "`torch.manual_seed(seed + rank)` after the model was made; a loader with a `generator=` "
    "of its own needs the rank added to that one's seed; a `worker_init_fn` must seed from "
    "`torch.initial_seed()`, not from the worker's number alone"
)


class IdenticalAugmentation(Check):
    """Ranks draw the same random numbers for their data

    ## What it finds
    Random generators that stand alike on several ranks when an epoch begins, and from which loading
    batches then really drew; the same in worker processes, whether they inherit that from the ranks
    or a `worker_init_fn` seeds them without the rank.

    ## How it knows
    As an epoch begins, each rank digests the states of torch's, numpy's and Python's generators
    without drawing from them, and notes the base seed of the workers. In the first two epochs it
    compares the states before and after the second, third and fourth batch, where there are no
    workers. Workers digest their generators after their first batch and note which of them the
    first four advanced; where they cannot (they are not forked), the ranks' base seeds are compared
    and digests of samples tell whether the second epoch has other content. What the ranks had in
    the first epoch is compared between them. The finding is proven.

    ## Why it hurts
    The n-th sample of every rank gets the same crop, flip or noise: less variety than there could
    be. It is often no harm.

    ## How to fix it
    Seed by rank after the model was made: `torch.manual_seed(seed + rank)`, the same for numpy and
    `random`; or give the loader `generator=torch.Generator().manual_seed(seed + rank)`.

    ## When it stays quiet
    Nothing random happens while data is loaded; a stream is shuffled as it begins, alike on all
    ranks, which then share it out; the ranks' generators differ, or their workers'.
    """

    code = "DDP510"
    name = "identical-augmentation"
    family = "data"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for loader in loaders(run):
            if loader.trains:
                for ranks in partners(run, loader):
                    yield from self._judge(run, loader, loader.of(ranks))

    def _judge(self, run: Run, loader: Loader, readers: list[Reader]) -> Iterator[Finding]:
        noted = [_noted(r) for r in readers]
        in_workers = all(noted)
        shared = [
            n
            for n in range(len(NAMES))
            if (_workers_in_step(noted, n) if in_workers else _in_step(readers, n))
        ]
        same_seed = _same_seed(readers)
        guessed = not (shared or in_workers) and same_seed and all(_changes(r) for r in readers)
        if not shared and not guessed:
            return
        workers = in_workers or guessed
        alone = in_workers and not same_seed
        reader = readers[0]
        names = [NAMES[n] for n in shared]
        what = f"the state of {' and '.join(names)}" if names else "their workers' base seed"
        yield self.finding(
            ranks=tuple(r.rank.rank for r in readers),
            subjects=(reader.seen.dataset,),
            location=reader.made_at,
            label="draws the same random numbers on these ranks",
            related=related(reader),
            summary=f"{whom(run, [r.rank.rank for r in readers])} share {what} while "
            f"{'their workers' if names and workers else 'they'} load {reader.seen.dataset}, so "
            "they augment alike",
            cause="the workers seed their generators with numbers that are the same on every rank, "
            "and loading draws from them"
            if alone
            else "the ranks seed their generators with the same number, and loading draws from "
            "them",
            fix=BY_THEMSELVES if alone else OF_WORKERS if workers else OF_PROCESS,
            evidence={
                "states at the begin": {r.rank.rank: _states(r) for r in readers[:16]},
                "base seeds": {r.rank.rank: r.epochs[0].began.base_seed for r in readers[:16]},
                "drawn while loading": names or "in the workers",
                **({"workers after a batch": _of_workers(readers, noted)} if in_workers else {}),
            },
            at=reader.rank.wall(reader.epochs[0].began.at),
        )


def _noted(reader: Reader) -> dict[int, WorkerRandom]:
    """What the workers of the first epoch wrote down, by their number."""
    ended = reader.epochs[0].ended
    return {w.worker: w for w in ended.workers} if ended else {}


def _workers_in_step(noted: list[dict[int, WorkerRandom]], generator: int) -> bool:
    """Some worker of every rank has this generator alike, and loading advances it."""
    for number in set.intersection(*map(set, noted)):
        peers = [workers[number] for workers in noted]
        states = {w.states[generator] for w in peers}
        if len(states) == 1 and 0 not in states and all(NAMES[generator] in w.drawn for w in peers):
            return True
    return False


def _in_step(readers: list[Reader], generator: int) -> bool:
    """All ranks begin with this generator alike, and loading advances it on all of them."""
    begins = {r.epochs[0].began.random[generator] for r in readers}
    ends = [r.epochs[0].ended for r in readers]
    drew = all(e is not None and NAMES[generator] in e.drawn for e in ends)
    return len(begins) == 1 and 0 not in begins and drew


def _same_seed(readers: list[Reader]) -> bool:
    seeds = {r.epochs[0].began.base_seed for r in readers}
    return len(seeds) == 1 and None not in seeds


def _changes(reader: Reader) -> bool:
    """The content of the same samples was another in the second epoch."""
    return len(reader.epochs) > 1 and changed(by_index(reader, 0), by_index(reader, 1))


def _states(reader: Reader) -> dict[str, str]:
    return _words(reader.epochs[0].began.random)


def _words(states: tuple[int, int, int]) -> dict[str, str]:
    return {n: f"{s:08x}" for n, s in zip(NAMES, states, strict=True)}


def _of_workers(
    readers: list[Reader], noted: list[dict[int, WorkerRandom]]
) -> dict[int, list[dict[str, str]]]:
    return {
        reader.rank.rank: [_words(w.states) for w in list(workers.values())[:8]]
        for reader, workers in zip(readers[:16], noted, strict=False)
    }
