"""DDP511."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.loader_faults import HELD_OUT, TWICE, LoaderFault, of_check
from ddpdoctor.analysis.data.phrases import SHORTEST, datasets, figures, no_loader, related
from ddpdoctor.events import OptimizerSeen
from ddpdoctor.report.findings import Check, Confidence, Evidence, Finding, Severity, Steps
from ddpdoctor.run import Location, Run, ranks_do, whom

KINDS = {
    "indices": "indices of a Subset",
    "choice": "whole numbers that select samples",
    "text": "texts, such as paths",
    "tensor": "tensors",
}


class DatasetMismatch(Check):
    """Ranks divide different data sets among them

    ## What it finds
    Ranks that share a data set by index, but whose indices stand for different samples: a
    `random_split` or another random choice without a common generator, a listing of files in
    another order, data sets of different length. Shares that each rank selected already, and that a
    sampler divides once more. Without such a sampler: splits that each rank makes for itself, so
    that one trains on what another holds out.

    ## How it knows
    When a loader is first iterated (the first eight that a line makes, then ever fewer), each rank
    digests what its data set selects samples by: `Subset.indices`, lists of ids or paths, tensors;
    of lists longer than 8192 entries half as many or more, spread evenly. The digests are compared
    between ranks whose sampler divides the data, or whose indices are seen to; or that train on
    `Subset`s of one data set with three in ten samples in common, and each hold out what is not in
    their own but, three in ten of it or more, in that of another. The finding is
    proven where indices, ids (whole numbers, none twice, closer together than by chance), texts,
    lengths or the order of equal entries differ, or a fifth of the samples that were looked at
    stand at other indices on another rank; else, where each rank holds tensors of its own, it is
    suspected.

    ## Why it hurts
    The shares do not add up to the data set: some samples are trained twice, others never, and with
    a random split samples of the test set of one rank are in the training set of another.

    ## How to fix it
    `random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))`; `sorted(...)`
    around every listing of files; shuffle lists with a generator of their own and a fixed seed.

    ## When it stays quiet
    The data sets agree; data sharded by hand per rank and read without a distributed sampler, also
    where shards have some samples in common. Where
    each rank fills its own tensors with numbers, it is a note: whether they stand for one data set
    cannot be told.
    """

    code = "DDP511"
    name = "dataset-mismatch"
    family = "data"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        groups: list[list[LoaderFault]] = []
        for fault in of_check(run, self.name):
            known = next((g for g in groups if any(_one(fault, other) for other in g)), None)
            if known is None:
                groups.append([fault])
            else:
                known.append(fault)
        for faults in groups:
            yield self._report(run, faults[0], faults[1:])

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check == "uneven-batches" and mine.severity is Severity.ERROR

    def _report(self, run: Run, fault: LoaderFault, alike: list[LoaderFault]) -> Finding:
        """`alike`: the same fault in other data sets, the other parts of a split say."""
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        names = list(fault.evidence["differs"])  # type: ignore[call-overload]
        reordered = bool(fault.evidence["same entries in another order"])
        kind = str(fault.evidence["kind"])
        lengths = {n: loaded.seen.length for n, loaded in fault.loader.readers.items()}
        alone = len(fault.ranks) < len(audit.epochs)
        sets = [reader, *(f.readers[0] for f in alike)]
        split, sampled = _split(fault), reader.seen.distributed
        leaks = HELD_OUT in fault.evidence
        how = "holds the same entries in another order" if reordered else "differs"
        return self.finding(
            severity=Severity.NOTE if fault.doubt else Severity.ERROR,
            confidence=Confidence.SUSPECTED if fault.doubt else Confidence.PROVEN,
            ranks=fault.ranks,
            steps=_steps(fault),
            subjects=(*dict.fromkeys(r.seen.dataset for r in sets), *names),
            location=_spot(fault),
            label="makes another choice on each rank"
            if split
            else "divides a data set that is not the same on all ranks",
            related=related(reader, sampler=split is not None),
            summary=_leaks(run, fault)
            if leaks
            else _twice(run, fault)
            if TWICE in fault.evidence
            else (
                f"{ranks_do(fault.ranks, 'divide')} another data set than the other ranks"
                if alone
                else f"{whom(fault.ranks, run.world_size)} divide different data sets among them"
            )
            + f": `{names[0]}` of {datasets(sets)} {how} between ranks"
            + (f", from step {reader.turn.step} on" if reader.turn.before else "")
            + (f" ({fault.doubt})" if fault.doubt else ""),
            **(
                _shared_out(reader.seen.sampler)
                if TWICE in fault.evidence
                else _why(kind, lengths, split, reordered=reordered, leaks=leaks, sampled=sampled)
            ),
            evidence={
                **fault.evidence,
                "kind": KINDS.get(kind, "entries"),
                "lengths": lengths,
                **(figures(audit) if leaks else _positions(audit)),
            },
            at=reader.rank.wall(audit.at),
        )


def _leaks(run: Run, fault: LoaderFault) -> str:
    rank, count = next(iter(fault.evidence[HELD_OUT].items()))  # type: ignore[attr-defined]
    return (
        f"{whom(fault.ranks, run.world_size)} split one data set, each for itself: {count} "
        f"samples that rank {rank} holds out are trained on by other ranks"
    )


def _twice(run: Run, fault: LoaderFault) -> str:
    sampler = fault.readers[0].seen.sampler
    return (
        f"{whom(fault.ranks, run.world_size)} select shares of their own, and {sampler} divides "
        f"each of them once more: an epoch reads {fault.evidence[TWICE]} samples"
    )


def _one(a: LoaderFault, b: LoaderFault) -> bool:
    """Whether two loaders suffer from one fault: one line makes their data sets, or what differs is
    the same beneath them."""
    if (a.doubt, a.ranks) != (b.doubt, b.ranks):
        return False
    beneath = _split(a) is None and a.evidence["digests"] == b.evidence["digests"]
    return beneath or _spot(a) == _spot(b)


def _positions(audit: Audit) -> Evidence:
    """What is counted are positions, which stand for other samples on each rank."""
    return {("positions seen" if k == "seen" else k): v for k, v in figures(audit).items()}


def _steps(fault: LoaderFault) -> Steps | None:
    """Those since the loader was first iterated, where one optimizer trains on what it gives."""
    reader = fault.readers[0]
    first, end = reader.epochs[0].began.step, reader.rank.steps
    if not fault.loader.trains or first >= end or len(reader.rank.of(OptimizerSeen)) > 1:
        return None
    return Steps(first, end - 1, end - first)


def _why(
    kind: str,
    lengths: dict[int, int],
    split: Location | None,
    *,
    reordered: bool,
    leaks: bool,
    sampled: bool,
) -> dict[str, str]:
    """`split`: the line that makes the `Subset`; `sampled`: a distributed sampler divides what each
    rank holds."""
    chosen = kind in ("indices", "choice")
    unlike = len(set(lengths.values())) > 1
    reported = ", ".join(f"{length} on rank {n}" for n, length in sorted(lengths.items()))
    if chosen and unlike:  # a random split is equally long everywhere
        return {
            "cause": f"each rank chose for itself which samples it keeps: {reported}",
            "fix": "choose them by what is the same on all ranks, or on one rank and send the "
            "indices to the others (`dist.broadcast_object_list`)",
        }
    if kind == "choice" and reordered:
        return {
            "cause": "each rank has shuffled the list for itself",
            "fix": "shuffle it with a generator of one seed on all ranks "
            "(`random.Random(0).shuffle(ids)`), or leave that to the sampler",
        }
    if kind == "choice":
        return {
            "cause": "each rank chose for itself which samples it keeps, and the sampler then "
            "gives it a share of these only",
            "fix": "choose them with a generator of one seed on all ranks (`random.Random(0)`, "
            "`torch.Generator().manual_seed(0)`); where each rank is to read a part of its own, "
            "leave the `DistributedSampler` out",
        }
    if kind == "indices" and split is not None and "Subset(" in split.source:
        return {
            "cause": "each rank chose the indices for itself, at random or by what is not the same "
            "on all ranks",
            "fix": "choose them with a generator of one seed on all ranks "
            "(`torch.randperm(n, generator=torch.Generator().manual_seed(0))`, "
            "`numpy.random.default_rng(0).permutation(n)`)",
        }
    if kind == "indices":
        return {
            "cause": "`random_split` (or another random choice) was made by each rank for itself",
            "fix": "`random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))`"
            + (", and a `DistributedSampler` over the part that is trained on" if leaks else ""),
        }
    if unlike and sampled:
        return {
            "cause": f"each rank has listed or made the entries for itself ({reported}), and the "
            "sampler gives it a share of these only",
            "fix": "where each rank is to read a shard of its own, leave the `DistributedSampler` "
            f"out and {SHORTEST}; where all are to hold the same, list it on one rank and send the "
            "list to the others (`dist.broadcast_object_list`)",
        }
    if kind != "text" and not (reordered or unlike):
        return {
            "cause": "each rank made the entries for itself, of random numbers or from sources of "
            "its own",
            "fix": "where they are random, seed alike on all ranks before the data set is made "
            "(`torch.manual_seed(seed)`, `np.random.seed(seed)`), or make it on one rank, save it "
            "and load it on all",
        }
    return {
        "cause": "each rank has listed or made the entries for itself",
        "fix": "make the order the same on all ranks: `sorted(...)` around the listing, or a "
        "generator with a fixed seed",
    }


def _shared_out(sampler: str) -> dict[str, str]:
    return {
        "cause": f"what the ranks select divides the data set already, and {sampler} divides it "
        "again",
        "fix": f"shard once: drop the ranks' own selection, or drop {sampler}",
    }


def _split(fault: LoaderFault) -> Location | None:
    """The line that chose what a `Subset` holds."""
    reader, names = fault.readers[0], fault.evidence["differs"]
    for depth, layer in enumerate(reader.seen.layers):
        if "dataset." * depth + "indices" in names:  # type: ignore[operator]
            return reader.rank.location(layer.site)
    return None


def _spot(fault: LoaderFault) -> Location | None:
    reader = fault.readers[0]
    uses = reader.sampler_at if reader.seen.distributed else reader.made_at
    return _split(fault) or uses
