"""Random generators in equal states on several ranks, from which loading data draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...events import Seeded, StepDraws, WorkerRandom
from ...run import Location, Rank, listed
from .content import by_index, changed
from .loaders import Reader

NAMES = ("torch", "numpy", "random")
"""The generators, in the order of `EpochBegan.random`."""

SEEDS = {"torch": "torch.manual_seed", "numpy": "np.random.seed", "random": "random.seed"}
FIX_SELF_SEEDED = (
    "seed the workers from `torch.initial_seed() % 2**32`, which differs between ranks and "
    "workers, or add the rank to the seed that `worker_init_fn` or the dataset sets"
)
FIX_WORKERS = (
    "call `torch.manual_seed(seed + rank)` after the model is built; if the loader has its own "
    "`generator=`, add the rank to that seed; a `worker_init_fn` must seed from "
    "`torch.initial_seed()`, not from the worker's number alone"
)
FIX_GENERATOR = (
    "the loader has a generator of its own (`generator=`, or one that a library keeps equal on all "
    "ranks), so add the rank in the workers: a `worker_init_fn` that calls {calls} with "
    "`(torch.initial_seed() + 1000 * rank) % 2**32`"
)
FIX_OF_DATASET = (
    "add the rank to the seed of this generator; in a worker, also its number "
    "(`get_worker_info().id`)"
)


@dataclass(frozen=True)
class Seeding:
    """A call that seeds a global generator with the same number on every rank, or restores the same
    state of it.

    Attributes:
        line: the user's.
        generator: its name; by: the module of a library that was called for it, empty for none.
        restored: it restores a state.
    """

    line: Location
    seed: str
    generator: str
    by: str
    restored: bool = False

    @property
    def cause(self) -> str:
        """Why the generators are in the same state."""
        if self.restored:
            return f"every rank restores the same state of {self.generator}'s generator"
        return "the ranks use the same seed"

    @property
    def fix(self) -> str:
        """How to seed each rank otherwise, once all that has to be equal was made from this seed:
        weights, splits, the order that a sampler shares out."""
        call = SEEDS[self.generator]
        if self.restored:
            return (
                "save the state of the generators on every rank (a file for each, or a list that "
                f"is gathered), and restore each rank's own at {self.line}; or call "
                f"`{call}(seed + rank)` after it"
            )
        if "lightning" in self.by:
            return (
                f"`{call}({self.seed} + self.global_rank)` in the module's `on_train_start`; leave "
                f"{self.line} as it is, since Lightning's sampler takes its seed from there"
            )
        return (
            f"call `{call}({self.seed} + rank)` right before training begins: {self.line} seeds "
            "all ranks alike"
        )


def seeded_alike(ranks: Sequence[Rank], generators: Sequence[str], before: float) -> Seeding | None:
    """The first call with the number with which all ranks have seeded one of these generators last
    before a time on the first rank's clock; None where they did not, or not alike."""
    for generator in generators or NAMES[:1]:
        calls = [[e for e in rank.of(Seeded) if e.generator == generator] for rank in ranks]
        seeds = [e.seed for e in calls[0] if e.at <= before]
        if not seeds or not all(any(e.seed == seeds[-1] for e in mine) for mine in calls):
            continue
        for event in calls[0]:
            line = ranks[0].location(event.site)
            if event.seed == seeds[-1] and line is not None:
                return Seeding(line, event.seed, generator, event.by, event.restored)
    return None


def all_seeded_alike(ranks: Sequence[Rank], before: float) -> list[Seeding]:
    """The same of every global generator."""
    found = (seeded_alike(ranks, (name,), before) for name in NAMES)
    return [seeding for seeding in found if seeding is not None]


def fix_of(seedings: Sequence[Seeding]) -> str:
    """What to do about equal samples that may be drawn from these generators."""
    fix = seedings[0].fix
    if len(seedings) > 1 and not any(s.restored or s.by for s in seedings):
        calls = listed([f"`{SEEDS[s.generator]}({s.seed} + rank)`" for s in seedings])
        lines = listed([str(s.line) for s in seedings])
        fix = f"call {calls} right before training begins: {lines} seed all ranks alike"
    return (
        f"if the samples are drawn at random, {fix}; add the rank to the seed of any other "
        "generator, too (an environment's, say). Otherwise shard the data: `data[rank::world_size]`"
    )


def seeded_apart(readers: Sequence[Reader]) -> Location | None:
    """The line at which each rank seeded a global generator last before it first iterated over a
    loader, with other seeds than the other ranks; None where there is none."""
    for generator in NAMES:
        last: list[tuple[Location | None, str]] = []
        for reader in readers:
            calls = (e for e in reader.rank.of(Seeded) if e.at <= reader.epochs[0].began.at)
            mine = [e for e in calls if e.generator == generator and not e.restored]
            if mine:
                last.append((reader.rank.location(mine[-1].site), mine[-1].seed))
        lines = {line for line, _ in last}
        if len(last) == len(readers) and len(lines) == 1 and len({seed for _, seed in last}) > 1:
            return lines.pop()
    return None


class Parted(NamedTuple):
    """A global generator that was in one state on all ranks when an epoch began, and is not since.

    Attributes:
        name: of the generator.
        same, since: the last epoch that began with equal states, and the first one with others.
    """

    name: str
    same: int
    since: int

    @property
    def text(self) -> str:
        return (
            f"{self.name}'s random state was the same on these ranks when epoch {self.same} began, "
            f"and is not since epoch {self.since}: in between some draw numbers that others do not"
        )


def parted(readers: Sequence[Reader]) -> Parted | None:
    """The first of the global generators that has parted between two epochs of a loader."""
    rows = zip(*(r.epochs for r in readers), strict=False)
    began = [[e.began for e in row] for row in rows]
    for n, name in enumerate(NAMES):
        states = [{e.random[n] for e in row} for row in began]
        equal = [len(found) == 1 and 0 not in found for found in states]
        if equal[:1] == [True] and False in equal:
            since = equal.index(False)
            if not any(equal[since:]):
                return Parted(name, began[since - 1][0].epoch, began[since][0].epoch)
    return None


class EqualGenerators(NamedTuple):
    """Random generators in the same state on all ranks while data is loaded.

    Attributes:
        names: of the generators that loading draws from; empty where only base seeds are known.
        workers: the worker processes draw, not the ranks.
        self_seeded: the workers do not get their seeds from the ranks, whose base seeds differ.
        of_dataset: the data set, or its transforms, keep these generators for themselves.
        own_generator: the workers get their seeds from a generator of the loader's, not from the
            ranks' own.
        seeding: where the program gave them the same seed, None where that is not known.
    """

    names: tuple[str, ...]
    workers: bool
    self_seeded: bool
    of_dataset: bool = False
    own_generator: bool = False
    seeding: Seeding | None = None

    @property
    def fix(self) -> str:
        if self.of_dataset:
            return FIX_OF_DATASET
        if self.self_seeded:
            return FIX_SELF_SEEDED
        if self.own_generator:
            calls = listed([f"`{SEEDS[name]}`" for name in self.names or NAMES])
            return FIX_GENERATOR.format(calls=calls)
        if self.workers:
            return FIX_WORKERS
        if self.seeding is not None:
            return self.seeding.fix
        calls = " and ".join(f"`{SEEDS[name]}(seed + rank)`" for name in self.names)
        return f"call {calls} after the model is built"


def equal_generators(readers: Sequence[Reader]) -> EqualGenerators | None:
    """None where no generator is in the same state on all ranks, or nothing draws from it."""
    peers = [worker_states(r) for r in readers]
    in_workers = all(peers)
    same_seed = _same_base_seed(readers)
    shared = tuple(
        name
        for n, name in enumerate(NAMES)
        if (_equal_in_workers(peers, n) if in_workers else _equal_in_ranks(readers, n))
    )
    if not shared and (kept := _equal_kept(readers, peers)):
        return EqualGenerators(kept, in_workers, in_workers and not same_seed, of_dataset=True)
    guessed = not (shared or in_workers) and same_seed and all(_changes(r) for r in readers)
    if not shared and not guessed:
        return None
    workers, self_seeded = in_workers or guessed, in_workers and not same_seed
    began = [r.epochs[0].began for r in readers]
    own_generator = workers and same_seed and len({b.random[0] for b in began}) > 1
    # Workers get their seeds from torch's generator.
    asked = ("torch",) if workers and not self_seeded else shared
    seeding = None if own_generator else seeded_alike([r.rank for r in readers], asked, began[0].at)
    return EqualGenerators(
        shared, workers, self_seeded, own_generator=own_generator, seeding=seeding
    )


def worker_states(reader: Reader) -> dict[int, WorkerRandom]:
    """What the workers of the first epoch recorded of their generators, by worker number."""
    ended = reader.epochs[0].ended
    return {w.worker: w for w in ended.workers} if ended else {}


def _equal_in_workers(peers: list[dict[int, WorkerRandom]], generator: int) -> bool:
    """Whether a worker of the same number has this generator in the same state on every rank, and
    loading advances it there."""
    for number in set.intersection(*map(set, peers)):
        same = [workers[number] for workers in peers]
        states = {w.states[generator] for w in same}
        if len(states) == 1 and 0 not in states and all(NAMES[generator] in w.drawn for w in same):
            return True
    return False


def _equal_in_ranks(readers: Sequence[Reader], generator: int) -> bool:
    """Whether all ranks begin with this generator in the same state, and loading advances it on all
    of them; and whether it stays the same, as it does where they draw equally many numbers."""
    begins = {r.epochs[0].began.random[generator] for r in readers}
    ends = [r.epochs[0].ended for r in readers]
    drew = all(e is not None and NAMES[generator] in e.drawn for e in ends)
    return len(begins) == 1 and 0 not in begins and drew and not _parts(readers, generator)


def _parts(readers: Sequence[Reader], generator: int) -> bool:
    """Whether this generator is in other states on the ranks when a later epoch, or a step that is
    on record, begins."""
    states: dict[tuple[str, int], set[int]] = {}
    for reader in readers:
        for epoch in reader.epochs:
            states.setdefault(("epoch", epoch.number), set()).add(epoch.began.random[generator])
        for event in reader.rank.of(StepDraws) if NAMES[generator] == "torch" else ():
            states.setdefault(("step", event.step), set()).add(event.before)
    return any(len(known) > 1 for known in states.values())


def _equal_kept(readers: Sequence[Reader], peers: list[dict[int, WorkerRandom]]) -> tuple[str, ...]:
    """The generators of the data set that are in the same state on all ranks after a batch, and
    that loading advances: in the workers of one number, or in the ranks."""
    if all(peers):
        numbers = set.intersection(*map(set, peers))
        rows = [[workers[number].kept for workers in peers] for number in sorted(numbers)]
    else:
        ends = [reader.epochs[0].ended for reader in readers]
        rows = [[end.kept for end in ends if end is not None]]
    return tuple(
        {
            name: None
            for row in rows
            if len(row) == len(readers)
            for name, state in row[0].items()
            if all(kept.get(name) == state for kept in row)
        }
    )


def _same_base_seed(readers: Sequence[Reader]) -> bool:
    seeds = {r.epochs[0].began.base_seed for r in readers}
    return len(seeds) == 1 and None not in seeds


def _changes(reader: Reader) -> bool:
    """Whether the same samples have other content in the second epoch."""
    return len(reader.epochs) > 1 and changed(by_index(reader, 0), by_index(reader, 1))
