"""A verdict on one loader whose data is divided wrongly among the ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from .epoch_audit import Audit
from .loaders import Loader, Reader

CheckName = Literal[
    "sampler-missing",
    "sampler-rank-mismatch",
    "sampler-seed-skew",
    "data-overlap",
    "dataset-mismatch",
]

Overlap = Literal[
    "equal-random-generators",
    "overlapping-selections",
    "different-shuffles",
    "overlapping-shares",
    "repeated-parts",
    "unsharded-stream",
    "unsharded-workers",
]
"""The rules of `data-overlap` that concern a loader."""


class Doubt(enum.Enum):
    """Why several ranks may read the same samples on purpose; the value is the text for people."""

    RANDOM_SAMPLES = "samples change each time they are read"
    ONE_SAMPLE = "only one sample was compared"
    EQUAL_SAMPLES = "all compared samples are identical"
    UNREADABLE = "sample content could not be compared"
    OWN_TENSORS = "each rank holds its own tensors"
    RANDOM_DATA = "samples seem to be random numbers made when they are read"


@dataclass(frozen=True)
class Difference:
    """How the datasets of the ranks differ.

    Attributes:
        names: what differs, as `Payload.name`; the first name is the one that decided.
        kind: of that, as `Payload.kind`.
        reordered: all ranks have the same entries, in another order.
        digests: of that, by rank.
        moved: how many samples the ranks have at different indices, and of how many; (0, 0) where
            that was not needed to decide.
    """

    names: tuple[str, ...]
    kind: str
    reordered: bool
    digests: dict[int, str]
    moved: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class LoaderFault:
    """One loader whose data is divided wrongly among ranks.

    Attributes:
        check: name of the check that reports it.
        overlap: the rule, for `data-overlap`.
        audit: the epoch that shows it; None for streams.
        doubt: why it may be intended, None where it is proven.
        parts: the sets of ranks that deliver the same samples, where others deliver others.
        beneath: audits of the dataset that the ranks select their parts from.
        first_epoch: the first epoch in which ranks deliver the same samples of a stream.
        compared: samples of a stream that several ranks (or workers) deliver, and how many were
            compared.
        workers_overlap: the workers of one rank do not divide the stream either.
        generators: random generators that are in the same state on all ranks.
        equal_samples, equal_batches: how many samples are the same at the same positions, and how
            many batches that the model was given.
        sources: what the samples are made of, where only that could be compared.
        selections: what each rank selects from one dataset, in words.
        shared_by_epoch: how many samples several ranks read, by epoch, where that changes.
        difference: how the ranks' datasets differ.
        held_out: by rank, how many samples that it holds out other ranks train on, and of how many.
        sharded_twice: samples read in an epoch, and of how many, where two things shard the data.
    """

    check: CheckName
    loader: Loader
    ranks: tuple[int, ...]
    readers: list[Reader]
    audit: Audit | None = None
    overlap: Overlap | None = None
    doubt: Doubt | None = None
    parts: tuple[tuple[int, ...], ...] = ()
    beneath: tuple[Audit, ...] = ()
    first_epoch: int = 0
    compared: tuple[int, int] = (0, 0)
    workers_overlap: bool = False
    generators: tuple[str, ...] = ()
    equal_samples: int = 0
    equal_batches: int = 0
    sources: list[str] = field(default_factory=list)
    selections: dict[int, str] = field(default_factory=dict)
    shared_by_epoch: list[int] = field(default_factory=list)
    difference: Difference | None = None
    held_out: dict[int, tuple[int, int]] = field(default_factory=dict)
    sharded_twice: tuple[int, int] | None = None
