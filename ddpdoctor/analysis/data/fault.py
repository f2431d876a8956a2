"""A verdict on one loader whose data is divided wrongly among the ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...report.findings import Evidence
from ...run import Location
from .content import in_one_order
from .epoch_audit import Audit
from .loaders import Loader, Reader
from .rng_state import EqualGenerators


class Doubt(enum.Enum):
    """Why several ranks may read the same samples on purpose; the value is the text for people."""

    RANDOM_SAMPLES = "samples change each time they are read"
    ONE_SAMPLE = "only one sample was compared"
    FEW_SAMPLES = "too few samples were compared"
    EQUAL_SAMPLES = "all compared samples are identical"
    UNREADABLE = "sample content could not be compared"
    OWN_TENSORS = "each rank holds its own tensors"
    RANDOM_DATA = "samples seem to be random numbers made when they are read"


class Intended(enum.Enum):
    """Why what ranks read of a loader is no fault, where a rule can say so."""

    INDICES_IGNORED = "the dataset ignores its indices, so they say nothing of its samples"
    READ_ALONE = "every rank evaluates everything, or reads all of its own part"
    DIVIDED = "the samplers divide the data, or padding and random draws explain what is shared"
    UNEXAMINED = "another loader of the same line reads other samples on each rank"
    ROWS_OF_ONE_BATCH = "each rank takes its rows of the same batches"
    REPEATED = "every rank reads each sample several times, and ranks feed the model other inputs"
    SHARED_IN_GROUPS = "ranks that read the same data have a group of their own, or do not train"
    OWN_SAMPLES = "the data is sharded manually: equal indices stand for other samples"


@dataclass(frozen=True)
class Difference:
    """How the datasets of the ranks differ.

    Attributes:
        ranks: those that differ from most others; all of them where there is no majority.
        names: what differs, as `Payload.name`; the first name is the one that decided.
        kind: of that, as `Payload.kind`.
        selected: the ranks differ in selection or order, not just in numbers that each drew.
        reordered: all ranks have the same entries, in another order.
        digests: of that, by rank.
        moved: how many samples the ranks have at different indices, and of how many; (0, 0) where
            that was not needed to decide.
        lengths: of the datasets, by rank.
        distributed: a distributed sampler divides them.
        split: the line that makes the `Subset` whose indices differ.
        alike: where each rank holds its own entries, parts of these that are the same on all, and
            how many parts were compared.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    kind: str
    selected: bool
    reordered: bool
    digests: dict[int, str]
    moved: tuple[int, int]
    lengths: dict[int, int]
    distributed: bool
    split: Location | None
    alike: tuple[int, int] = (0, 0)

    @property
    def unequal(self) -> bool:
        return len(set(self.lengths.values())) > 1

    @property
    def rule(self) -> str:
        """Why the entries differ: the first reason that fits."""
        return next(rule for rule, fits in REASONS if fits(self))


REASONS: tuple[tuple[str, Callable[[Difference], bool]], ...] = (
    # A random split is equally long everywhere.
    ("selections-of-unequal-length", lambda d: d.kind in ("indices", "choice") and d.unequal),
    ("shuffled-lists", lambda d: d.kind == "choice" and d.reordered),
    ("random-selection", lambda d: d.kind in ("choice", "chosen")),
    (
        "random-indices",
        lambda d: d.kind == "indices" and d.split is not None and "Subset(" in d.split.source,
    ),
    ("table-selection", lambda d: d.kind == "indices" and d.names[0].endswith("_indices")),
    ("random-split", lambda d: d.kind == "indices"),
    ("lists-of-unequal-length", lambda d: d.unequal and d.distributed),
    ("partly-own-entries", lambda d: d.alike[0] > 0 and not d.unequal),
    ("own-entries", lambda d: d.kind != "text" and not (d.reordered or d.unequal)),
    ("listing-order", lambda d: True),
)


class PartlyShared(NamedTuple):
    """Rows that several ranks deliver, while each has others of its own.

    Attributes:
        epoch: the first in which it is so.
        common: the rows of the first rank that another one delivers too, of `of` compared.
        files: files that several ranks read at one line in that epoch, of `read` in all; 0 where
            that is not on record.
        line: that line.
    """

    epoch: int
    common: int
    of: int
    files: int = 0
    read: int = 0
    line: Location | None = None


@dataclass(eq=False)
class LoaderFault:
    """One loader whose data is divided wrongly among ranks.

    Attributes:
        check: name of the check that reports it.
        rule: which rule decided.
        audit: the epoch that shows it; None for streams.
        doubt: why it may be intended, None where it is proven.
        parts: the sets of ranks that deliver the same samples, where others deliver others.
        beneath: audits of the dataset that the ranks select their parts from.
        first_epoch: the first epoch in which ranks deliver the same samples of a stream.
        compared: samples of a stream that several ranks (or workers) deliver, and how many were
            compared.
        workers_overlap: the workers of one rank do not divide the stream either.
        generators: random generators in the same state on all ranks.
        selections: what each rank selects from one dataset, in words.
        partly: rows of a stream that several ranks deliver, while each has others of its own.
        shared_by_epoch: how many samples several ranks read, by epoch, where that changes.
        difference: how the ranks' datasets differ.
        facts: what the sentences of the rule are filled in with.
        evidence: the figures of the rule, beyond those of the audit.
    """

    check: str
    rule: str
    loader: Loader
    ranks: tuple[int, ...]
    readers: list[Reader]
    audit: Audit | None = None
    doubt: Doubt | None = None
    parts: tuple[tuple[int, ...], ...] = ()
    beneath: tuple[Audit, ...] = ()
    first_epoch: int = 0
    compared: tuple[int, int] = (0, 0)
    workers_overlap: bool = False
    generators: EqualGenerators | None = None
    selections: dict[int, str] = field(default_factory=dict)
    partly: PartlyShared | None = None
    shared_by_epoch: list[int] = field(default_factory=list)
    difference: Difference | None = None
    facts: dict[str, object] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=dict)


_OWN_ORDERS = (
    ", before anything is shuffled: each rank has an order of its own, of which shares overlap"
)


def how_to_shard(fault: LoaderFault) -> str:
    """How to shard an iterable dataset by rank and worker, or by worker alone; or the parts of
    another one."""
    seen = fault.readers[0].seen
    if not seen.iterable:
        return (
            "select the part, or the seed, of each rank by `rank` itself; or load the whole "
            "dataset on every rank and shard it: `DataLoader(dataset, "
            "sampler=DistributedSampler(dataset))`"
        )
    workers = fault.rule == "unsharded-workers"
    taken = "i, None, n" if workers else "rank * n + i, None, world_size * n"
    code = (
        "`info = get_worker_info()`, `n, i = (info.num_workers, info.id) if info else (1, 0)`, "
        f"`islice(samples, {taken})`"
    )
    by_worker = all(r.seen.workers > 1 for r in fault.readers) and not fault.workers_overlap
    in_order = in_one_order(fault.readers)
    if not workers and by_worker:
        known = "where it divides the samples among its workers (here, or in a `worker_init_fn`), "
        numbers = (
            "use `rank * info.num_workers + info.id` for `info.id` and "
            "`world_size * info.num_workers` for `info.num_workers`"
        )
        code = known + numbers + ("" if in_order else f"; if it does so nowhere, {code}")
    if fault.rule == "unsharded-stream" and not in_order:
        code += _OWN_ORDERS
    if fault.rule == "repeated-parts":
        return (
            "assigning parts by rank (`parts[rank::world_size]`) works only if their number is a "
            "multiple of the number of ranks; otherwise let every rank iterate all parts and take "
            f"its own samples: {code}"
        )
    function = "split_by_worker" if workers else "split_by_node"
    return (
        f"if the dataset is from a library, use its own function for it (`{function}`); otherwise "
        f"in `{seen.dataset}.__iter__`: {code}"
    )
