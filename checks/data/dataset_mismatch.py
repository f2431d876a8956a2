"""DDP511."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.fault import Difference, LoaderFault
from ddpdoctor.analysis.data.labels import Renumbered, renumbered
from ddpdoctor.analysis.data.loader_check import (
    SHORTEST,
    LoaderCheck,
    Words,
    dataset,
    datasets,
    doubt,
    figures,
    on_each_rank,
    related,
    when,
)
from ddpdoctor.analysis.data.loaders import Reader
from ddpdoctor.analysis.data.rng_state import seeded_apart
from ddpdoctor.events import OptimizerSeen
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Evidence, Finding, Related, Severity, Steps
from ddpdoctor.run import Location, Run, equal_ranks, ranks_do, ranks_text, whom

KINDS = {
    "indices": "indices of a Subset",
    "choice": "whole numbers that select samples",
    "chosen": "entries of samples that each rank selects",
    "text": "texts, such as paths",
    "tensor": "tensors",
}
"""`Payload.kind` in words."""

ORDERS = {
    "shuffle": "{at} shuffles them, on each rank with its own random state",
    "listing": "{at} lists them in the order of the file system, which may differ between nodes",
    "set": "{at} takes them from a set, whose order differs between processes",
}
"""What gives the same entries another order in each process."""

DRAWN = ("random-selection", "random-split", "own-entries")
"""Rules of what may be drawn from global random generators."""


class DatasetMismatch(LoaderCheck):
    """Ranks shard different datasets

    ## What it finds
    Ranks that share a dataset by index although equal indices are other samples on each rank: a
    `random_split` or another random selection without a common seed, files listed in another order,
    datasets of different lengths. Also a selection that each rank makes and a sampler shards again,
    and equal samples that each rank labels with other numbers, as `hash(name)` or the order of a
    set gives them. Without a distributed sampler: splits that each rank makes by itself, so that
    one rank trains on what another one holds out.

    ## How it knows
    When a loader is first iterated (the first eight that a line makes, then ever fewer), each rank
    digests what its dataset selects samples by: `Subset.indices`, lists of ids or paths, tensors.
    Where the same entries have another order, the source is searched for the line that shuffles or
    lists them, and it is named if there is only one.
    Of lists longer than 8192 entries it is half of them or more, evenly spaced. The digests are
    compared between ranks whose sampler shards the data, or that are seen to read disjoint indices.
    Splits are compared between ranks that train on `Subset`s of one dataset: these must have three
    in ten samples in common, and so must what one rank holds out and another one trains on.

    Whole numbers of samples (labels, ids) are compared by index, among some 256 samples of epochs
    0, 1, 2, 4, 8 and so on that several ranks read in one of these. They are other numbers for the
    same classes if equal numbers of one rank are equal numbers of the other one, too. The line that
    does it is looked up in the source.

    The finding is proven if indices, ids (distinct whole numbers, denser than by chance), texts,
    lengths or the order of equal entries differ, if a fifth of the compared samples have another
    index on another rank, or if some of 16 parts of the entries are the same on all ranks and
    others are not. Otherwise, if each rank holds its own tensors, it is suspected.

    ## Why it hurts
    The shares do not add up to the dataset: some samples are trained on twice, others never. With a
    random split, test samples of one rank are in the training set of another.

    ## How to fix it
    `random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))`; `sorted(...)`
    around every listing of files; a separate generator with a fixed seed to shuffle lists;
    `sorted(set(labels))` before classes are numbered.

    ## When it stays quiet
    - The datasets are equal.
    - Labels are drawn at random each time, or for each sample.
    - Each rank reads its own shard without a distributed sampler, even if shards have some samples
      in common.

    Only a note: each rank fills its own tensors with numbers, so that it is unknown whether they
    should be one dataset.
    """

    code = "DDP511"
    name = "dataset-mismatch"
    severity = Severity.ERROR
    words: ClassVar[Mapping[str, Words]] = {
        "sharded-twice": Words(
            "the ranks select shares of the dataset, and a sampler shards each again",
            "the ranks' own selections shard the dataset already, and {sampler} shards it again",
            "shard once: remove the ranks' own selection, or remove {sampler}",
            summary="{who} select their own shares, and {sampler} shards each again: an epoch "
            "reads {read} of {of} samples",
        ),
        "leaking-split": Words(
            "without a distributed sampler, ranks train on what others hold out",
            "{cause}",
            "{fix}{over}",
            summary="{who} split one dataset differently: other ranks train on {count} of {of} "
            "samples that rank {rank} holds out",
        ),
        "selections-of-unequal-length": Words(
            "each rank selects another number of samples",
            "each rank selects its samples by itself: {lengths}",
            "select them by what is equal on all ranks, or on one rank, and send the indices to "
            "the others (`dist.broadcast_object_list`)",
        ),
        "shuffled-lists": Words(
            "each rank holds the same list of samples in another order",
            "each rank shuffles the list by itself",
            "shuffle it with the same seed on all ranks (`random.Random(0).shuffle(ids)`), or "
            "leave that to the sampler",
        ),
        "random-selection": Words(
            "each rank selects other samples of the same data",
            "each rank selects its samples by itself, and the sampler then gives it only a share "
            "of these",
            "select them by what is equal on all ranks: the same seed (`random.Random(0)`, "
            "`torch.Generator().manual_seed(0)`), `zlib.crc32(name.encode())`, not `hash(name)`; "
            "if each rank should read its own part, remove the `DistributedSampler`",
        ),
        "random-indices": Words(
            "each rank passes other indices to `Subset`",
            "each rank selects the indices by itself, at random or by something that differs "
            "between ranks",
            "select them with the same seed on all ranks "
            "(`torch.randperm(n, generator=torch.Generator().manual_seed(0))`, "
            "`numpy.random.default_rng(0).permutation(n)`)",
        ),
        "random-split": Words(
            "`random_split`, or the like, gives another `Subset` on each rank",
            "each rank calls `random_split` (or selects at random) with its own random state",
            "`random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))`",
        ),
        "table-selection": Words(
            "a dataset of Hugging Face datasets selects other rows of its table on each rank",
            "each rank splits, shuffles or selects the rows at random, by itself",
            "give the seed: `dataset.train_test_split(..., seed=0)`, `dataset.shuffle(seed=0)`",
        ),
        "lists-of-unequal-length": Words(
            "each rank makes a list of another length, and a sampler shards it",
            "each rank lists or makes the entries by itself ({lengths}), and the sampler gives it "
            "only a share of these",
            "if each rank should read its own shard, remove the `DistributedSampler` and "
            f"{SHORTEST}; if all should hold the same, list it on one rank and send the list to "
            "the others (`dist.broadcast_object_list`)",
        ),
        "hashed-labels": Words(
            "the same samples have other labels or ids on other ranks, and the program uses `hash`",
            "`hash()` of a text differs between processes, so each rank numbers the same names in "
            "its own way",
            "number the names by a table that is the same on all ranks: `index = {{name: i for i, "
            "name in enumerate(sorted(names))}}`; or use a hash that is the same in every process "
            "(`zlib.crc32(name.encode())`)",
        ),
        "labels-from-a-set": Words(
            "the same samples have other labels or ids on other ranks, and the program numbers the "
            "elements of a set",
            "a set of texts is iterated in another order in each process, so each rank numbers the "
            "same names in its own way",
            "sort the set before it is numbered: `sorted(set(...))`",
        ),
        "other-labels": Words(
            "the same samples have other labels or ids on other ranks",
            "each rank numbers the same classes or names in its own way",
            "make the table of numbers the same on all ranks: from a sorted list of the names, or "
            "on one rank, sent to the others (`dist.broadcast_object_list`)",
        ),
        "partly-own-entries": Words(
            "a part of the entries is the same on all ranks, and each rank has others in the rest",
            "{alike} of {parts} parts of the entries are the same on all ranks: it is one dataset, "
            "of which each rank made or chose some entries by itself",
            "make or choose these entries on one rank and send them to the others "
            "(`dist.broadcast_object_list`), or from values and random numbers that are the same "
            "on all ranks; sort what is chosen from a set or a listing",
        ),
        "own-entries": Words(
            "each rank holds other entries, such as random tensors",
            "each rank makes the entries by itself, from random numbers, or takes its own share of "
            "the data, of which the sampler then gives it a part only",
            "if each rank already holds its share, do not divide it again: no distributed sampler, "
            "and no `prepare` of this loader; if the entries are random, use the same seed on all "
            "ranks before the dataset is made (`torch.manual_seed(seed)`), or make it on one rank, "
            "save it and load it on all",
        ),
        "listing-order": Words(
            "each rank lists or makes the entries by itself",
            "each rank lists or makes the entries by itself",
            "make the order the same on all ranks: `sorted(...)` around the listing, or a "
            "generator with a fixed seed",
        ),
    }
    rules = when(words)
    effects = (Effect(("uneven-batches",), when=(When.IS_ERROR,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        groups: list[list[LoaderFault]] = []
        labels = list(renumbered(run))
        # Where all else is equal, that is what differs, whatever the labels are kept in.
        told = {id(found.division.loader) for found in labels if found.same_samples}
        for fault in self.faults(run):
            if id(fault.loader) in told:
                continue
            known = next((g for g in groups if any(_same_fault(fault, o) for o in g)), None)
            if known is None:
                groups.append([fault])
            else:
                known.append(fault)
        for faults in groups:
            yield self._report(run, faults[0], faults[1:])
        faulty = {id(fault.loader) for fault in self.faults(run)} - told
        same: dict[object, Renumbered] = {}
        for found in labels:
            if id(found.division.loader) not in faulty:
                same.setdefault((found.rule, found.cause, found.division.numbers), found)
        yield from (self._of_labels(run, found) for found in same.values())

    def _of_labels(self, run: Run, found: Renumbered) -> Finding:
        """The finding that equal samples have other labels on other ranks."""
        reader, words = found.division.readers[0], self.words[found.rule]
        ranks = found.division.numbers
        line = reader.rank.location(found.cause.site) if found.cause else None
        who = whom(ranks, run.world_size)
        return self.of_reader(
            reader,
            rule=found.rule,
            ranks=ranks,
            location=line or reader.made_at,
            label="differs between processes" if line else "yields other labels on each rank",
            related=related(reader, sampler=False),
            summary=f"{who} label the same samples of {dataset(reader)} with other numbers: "
            f"{found.differ} of {found.compared} compared",
            cause=words.cause,
            fix=words.fix.format_map({}),
            evidence={
                "samples compared by index": found.compared,
                "with other numbers": found.differ,
                "different numbers among them": found.values,
            },
        )

    def _report(self, run: Run, fault: LoaderFault, others: list[LoaderFault]) -> Finding:
        """The finding; `others` are the same fault in other datasets (parts of a split)."""
        audit, reader, difference = fault.audit, fault.readers[0], fault.difference
        assert audit is not None and difference is not None
        sets = [reader, *(f.readers[0] for f in others)]
        why = self.words[difference.rule]
        facts: dict[str, object] = {
            "who": whom(fault.ranks, run.world_size),
            "sampler": reader.seen.sampler,
            "lengths": on_each_rank(difference.lengths.items()),
            "over": ", and a `DistributedSampler` over the training part"
            if difference.rule == "random-split"
            else "",
            "alike": difference.alike[0],
            "parts": difference.alike[1],
            **fault.facts,
        }
        facts |= {"cause": why.cause.format_map(facts), "fix": why.fix}
        order = _ordered(fault)
        cause = ORDERS[order[0]].format(at=order[1]) if order is not None else ""
        random = order[0] == "shuffle" if order is not None else difference.rule in DRAWN
        seeds = seeded_apart(fault.readers) if random else None
        if seeds is not None:
            cause = f"{cause or facts['cause']}; {seeds} seeds each rank differently"
        summary = self.words[fault.rule].summary.format_map(facts)
        return self.of_fault(
            fault,
            facts,
            steps=_steps(fault),
            subjects=(*dict.fromkeys(r.seen.dataset for r in sets), *difference.names),
            location=_spot(fault),
            label="selects other samples on each rank"
            if difference.split
            else "shards a dataset that differs between ranks",
            related=(
                *((Related("orders them", order[1]),) if order is not None else ()),
                *((Related("seeds each rank differently", seeds),) if seeds is not None else ()),
                *related(reader, sampler=difference.split is not None),
            ),
            summary=(summary or _summary(run, fault, difference, audit, datasets(sets)))
            + (f", from step {reader.turn.step} on" if reader.turn.before else "")
            + doubt(fault),
            evidence=_evidence(fault, difference, audit),
            **({"cause": cause} if cause else {}),  # type: ignore[arg-type]
        )


def _ordered(fault: LoaderFault) -> tuple[str, Location] | None:
    """As `_orders`, where the ranks have the entries in another order, or some of them drawn."""
    difference = fault.difference
    by_order = difference is not None and (difference.reordered or difference.kind == "choice")
    return _orders(fault.readers[0]) if by_order else None


def _orders(reader: Reader) -> tuple[str, Location] | None:
    """How the program gives the entries an order of each process, and on which line; None where not
    exactly one line may do that."""
    causes = [cause for cause in reader.seen.per_process if cause.how in ORDERS]
    line = reader.rank.location(causes[0].site) if len(causes) == 1 else None
    return (causes[0].how, line) if line is not None else None


def _summary(run: Run, fault: LoaderFault, difference: Difference, audit: Audit, names: str) -> str:
    how = "has the same entries in another order" if difference.reordered else "differs"
    return (
        f"{ranks_do(fault.ranks, 'shard')} another dataset than the other ranks"
        if len(fault.ranks) < len(audit.epochs)
        else f"{whom(fault.ranks, run.world_size)} shard different datasets"
    ) + f": `{difference.names[0]}` of {names} {how}"


def _evidence(fault: LoaderFault, difference: Difference, audit: Audit) -> Evidence:
    (moved, of), (alike, parts) = difference.moved, difference.alike
    # Indices stand for other samples on each rank: what the audit counts are positions.
    leaks = fault.rule == "leaking-split"
    counted = figures(audit).items()
    return {
        "differs": list(difference.names),
        "same entries in another order": difference.reordered,
        "digests": difference.digests,
        "distinct selections": " | ".join(map(ranks_text, equal_ranks(difference.digests))),
        "kind": KINDS.get(difference.kind, "entries"),
        **({"same samples at other indices": f"{moved} of {of}"} if moved else {}),
        **({"parts that are the same on all ranks": f"{alike} of {parts}"} if alike else {}),
        **fault.evidence,
        "lengths": difference.lengths,
        **{("positions read" if k == "samples read" and not leaks else k): v for k, v in counted},
    }


def _same_fault(a: LoaderFault, b: LoaderFault) -> bool:
    """Whether two loaders suffer from one fault: one line makes their datasets, or orders them, or
    what differs is the same dataset beneath them."""
    if (a.doubt, a.ranks) != (b.doubt, b.ranks) or a.difference is None or b.difference is None:
        return False
    if (order := _ordered(a)) is not None and order == _ordered(b):
        return True
    beneath = a.difference.split is None and a.difference.digests == b.difference.digests
    return beneath or _spot(a) == _spot(b)


def _steps(fault: LoaderFault) -> Steps | None:
    """The steps since the loader was first iterated; None unless one optimizer trains on it."""
    reader = fault.readers[0]
    first, end = reader.epochs[0].began.step, reader.rank.steps
    if not fault.loader.trains or first >= end or len(reader.rank.of(OptimizerSeen)) > 1:
        return None
    return Steps(first, end - 1, end - first)


def _spot(fault: LoaderFault) -> Location | None:
    reader = fault.readers[0]
    uses = reader.sampler_at if reader.seen.distributed else reader.made_at
    return (fault.difference.split if fault.difference else None) or uses
