"""DDP507."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.audit_table import audit_table
from ddpdoctor.analysis.data.fault import LoaderFault
from ddpdoctor.analysis.data.forward_inputs import (
    EqualGradients,
    EqualInputs,
    Inputs,
    equal_gradients,
    equal_inputs,
    inputs,
)
from ddpdoctor.analysis.data.loader_faults import faults, of_check
from ddpdoctor.analysis.data.phrases import (
    dataset,
    figures,
    no_loader,
    on_each_rank,
    related,
    since,
    steps_from,
    use,
)
from ddpdoctor.analysis.data.rng_state import equal_generators
from ddpdoctor.events import Averaged, ForwardInput, StepDone
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Confidence, Evidence, Finding, Severity, Steps, Table
from ddpdoctor.run import Location, Rank, Run, listed, ranks_text, some, whom

SETS_NAMED = 3
"""Most sets of ranks that a summary names."""


class DataOverlap(Check):
    """Ranks, or the workers of one rank, consume the same samples

    ## What it finds
    Ranks that train on the same samples for another reason than a missing or misconfigured
    `DistributedSampler`:

    - an `IterableDataset` that is not sharded by rank or by worker
    - ranks that read the same files
    - a custom sampler whose shares overlap
    - parts of one dataset (`Subset`, slices of a list) that each rank selects and that overlap
    - data that should differ between ranks but is the same on some of them
    - samples that are picked at random, from a generator in the same state on all ranks
    - a loop without a loader that feeds the same slices or the same random positions

    Also where this begins only later in the run.

    ## How it knows
    With loaders, the delivered indices are compared between the ranks (all of them up to 262,144
    per line that makes the loader, then one in 2, in 4 and so on), and so are digests of some 256
    samples of epochs 0, 1, 2, 4, 8 and so on. Streams have no indices; of these, all rows of an
    epoch of at most 4096 are digested, too. What a `Subset` selects is recorded up to 16,384
    samples, regular selections up to 262,144.

    Without loaders, the inputs of wrapped models are compared, at the first 16 forwards, then at
    every eighth and ever fewer. Without a wrapper, it is some values of each rank's own gradients
    before the program synchronises them, in four steps. Only host memory is read.

    Selections overlap if the last samples of one are the first of another (at least three in ten),
    or if nine in ten samples are equal; the data beneath must be the same on all ranks, and both
    ranks must read that much of it. Lists that each rank holds are compared by digests.

    The finding is proven. It is suspected if samples could not be compared, are all identical or
    change each time they are read, and if inputs are unknown or seem to be random.

    ## Why it hurts
    Several ranks (or workers) do the work of one, and an epoch holds every sample several times.

    ## How to fix it
    In the dataset, take every n-th sample, where n is ranks times workers, from `dist.get_rank()`
    and `torch.utils.data.get_worker_info()`. Files or other parts can be assigned to ranks
    (`parts[rank::world_size]`) only if their number is a multiple of the number of ranks. In a
    loop without a loader, start at the rank and stride by the world size, or add the rank to the
    seed. A dataset that picks samples at random needs the rank in its seed, too: a
    `DistributedSampler` has no effect there.

    ## When it stays quiet
    - The samples differ.
    - Streams are drawn with replacement.
    - Selections overlap by little, or all ranks have some samples in common.
    - One rank sends the inputs to the others (broadcast, scatter), or they are shared within a
      tensor-parallel group or between the stages of a pipeline.
    - The ranks exchange tensors in a smaller process group of their own in every step, or have one
      and hold the same part of the data.
    - A sampler repeats each of some samples equally often, on other ranks each time (repeated
      augmentation).

    Only a note: inputs that never change or are drawn from the global random generators just
    before the forward; evaluation.
    """

    code = "DDP507"
    name = "data-overlap"
    family = "data"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "unsharded-stream": "all ranks iterate the whole of an iterable dataset",
        "unsharded-workers": "the workers of one rank each iterate the whole of its dataset",
        "repeated-parts": "some ranks deliver the same samples, while others deliver other ones",
        "equal-random-generators": "the dataset picks samples at random, equally on all ranks",
        "overlapping-selections": "the ranks select parts of one dataset that overlap",
        "different-shuffles": "the ranks shuffle in different orders and each takes its share of "
        "its own",
        "overlapping-shares": "the sampler yields some samples on several ranks",
        "equal-inputs": "without a loader, ranks feed a model the same inputs",
        "equal-random-inputs": "without a loader, ranks feed a model equal random numbers",
        "constant-inputs": "without a loader, ranks feed a model equal inputs that never change",
        "equal-gradients": "without DDP, ranks compute the same gradients before they exchange "
        "them",
    }
    effects = (
        Effect(
            ("identical-augmentation",), of=("equal-random-generators",), when=(When.SAME_LINE,)
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        if (reason := no_loader(run)) is None or any(
            any(e.digest for e in r.of(ForwardInput)) or any(e.alone for e in r.of(Averaged))
            for r in run.ranks.values()
        ):
            return None
        if run.any(ForwardInput):
            return f"{reason}, and no input of a wrapped model was in host memory"
        return (
            f"{reason}, no forward of a wrapped model was seen, and no gradients before a manual "
            "all-reduce"
        )

    def examine(self, run: Run) -> Iterable[Finding]:
        found = any(faults(run))
        for fault in of_check(run, self.name):
            yield self._of_loader(run, fault)
        for given in inputs(run):
            if sets := [same for same in equal_inputs(run, given) if not same.intended]:
                yield self._of_inputs(run, given, sets)
        for work in () if found else equal_gradients(run):
            yield self._of_gradients(run, work)

    def tables(self, run: Run) -> Iterator[Table]:
        yield from audit_table(run)

    def _of_loader(self, run: Run, fault: LoaderFault) -> Finding:
        reader, audit = fault.readers[0], fault.audit
        workers = fault.overlap == "unsharded-workers"
        note = fault.doubt is not None or not fault.loader.trains
        number = fault.first_epoch
        who = _sets(fault.parts) if len(fault.parts) > 1 else whom(fault.ranks, run.world_size)
        who = f"the workers of {who}" if workers else who
        if audit is not None:
            what = f"the same {len(audit.shared)} of {len(audit.total)} samples"
        elif workers or fault.overlap == "equal-random-generators":
            what = "the same samples"
        else:
            what = "the same samples ({} of {} compared)".format(*fault.compared)
        return self.finding(
            rule=fault.overlap,
            severity=Severity.NOTE if note else Severity.ERROR,
            confidence=Confidence.SUSPECTED if fault.doubt else Confidence.PROVEN,
            ranks=fault.ranks,
            steps=steps_from(reader, reader.epoch(number)),
            subjects=(reader.seen.dataset,),
            location=_spot(fault),
            label="not sharded by worker"
            if workers
            else "picks the same samples on these ranks"
            if fault.overlap == "equal-random-generators"
            else "ranks get the same samples",
            related=related(reader),
            summary=f"{who} deliver {what} of {dataset(reader)} in {use(fault.loader)}"
            f"{since(reader, number)}" + (f" ({fault.doubt.value})" if fault.doubt else ""),
            cause=_cause(fault),
            fix=_fix(fault),
            evidence={**(figures(audit) if audit else {}), **_evidence(fault)},
            at=reader.rank.wall(audit.at if audit else reader.epochs[number].began.at),
        )

    def _of_gradients(self, run: Run, work: EqualGradients) -> Finding:
        rank = run.ranks[work.ranks[0]]
        sure = work.seen and not (work.drawn or work.constant)
        count = len(work.steps)
        return self.finding(
            rule="equal-gradients",
            severity=Severity.ERROR if sure else Severity.NOTE,
            confidence=Confidence.PROVEN if sure else Confidence.SUSPECTED,
            ranks=work.ranks,
            steps=Steps(work.steps[0], work.steps[-1], count, count),
            subjects=(work.kind,),
            location=rank.location(work.event.site),
            label="the same inputs on these ranks",
            summary=f"the local gradients of {work.kind}, before any exchange, are bit-identical "
            f"on {whom(work.ranks, run.world_size)} in all {count} compared steps"
            + (" (from equal random inputs)" if work.drawn else "")
            + (" (from inputs that never change)" if work.constant else ""),
            cause="each of these ranks trains on the same samples, so they do the work of one",
            fix="shard the data: `data[rank::world_size]`; if samples are drawn at random, add "
            "the rank to the seed",
            evidence={
                "steps compared": work.steps,
                "first gradient values": [float(f"{v:.6g}") for v in work.event.local[:8]],
                "inputs are known to be equal": work.seen,
                "inputs are random": work.drawn,
            },
            at=rank.wall(work.event.at),
        )

    def _of_inputs(self, run: Run, given: Inputs, sets: list[EqualInputs]) -> Finding:
        same = min(sets, key=lambda s: s.toy)
        sets = [s for s in sets if s.toy == same.toy]
        rank = run.ranks[same.ranks[0]]
        parts = tuple(s.ranks for s in sets)
        rule = _rule_of_inputs(same)
        return self.finding(
            rule=rule,
            severity=Severity.NOTE if same.toy else Severity.ERROR,
            confidence=Confidence.SUSPECTED if same.toy else Confidence.PROVEN,
            ranks=tuple(sorted({r for ranks in parts for r in ranks})),
            subjects=(f"inputs of {given.kind}",),
            location=rank.location(same.event.site),
            steps=_steps(rank, given, same) if same.late else None,
            label="the same inputs on these ranks",
            summary=f"{_sets(parts) if len(parts) > 1 else whom(same.ranks, run.world_size)} feed "
            f"{given.kind} the same inputs at all {len(same.forwards)} compared forwards"
            + (f" from forward {same.forwards[0]} on" if same.late else "")
            + (" (equal random numbers)" if same.drawn else "")
            + (" (they never change)" if same.constant else ""),
            cause=CAUSES_OF_INPUTS[rule],
            fix="shard the data: `data[rank::world_size]`; if positions are drawn at random, seed "
            "with the rank: `torch.manual_seed(seed + rank)` after the model is built",
            evidence={
                "forwards compared": some(same.forwards, 20),
                **({"differed last at": same.differed} if same.late else {}),
                "digests": [
                    f"{given.by_rank[same.ranks[0]][n].digest:08x}" for n in same.forwards[:8]
                ],
                "numbers per input": same.event.numbers,
                "inputs are random": same.drawn,
            },
            at=rank.wall(same.event.at),
        )


CAUSES_OF_INPUTS = {
    "equal-random-inputs": "each rank takes the same samples, or draws the same random positions: "
    "the ranks' random generators are in the same state",
    "constant-inputs": "every rank trains on the same constant data, as a single rank would",
    "equal-inputs": "each of these ranks takes the same samples from the same data",
}


def _rule_of_inputs(same: EqualInputs) -> str:
    if same.drawn:
        return "equal-random-inputs"
    return "constant-inputs" if same.constant else "equal-inputs"


def _spot(fault: LoaderFault) -> Location | None:
    """The line that makes the overlapping `Subset`, or else the loader."""
    reader = fault.readers[0]
    layers = reader.seen.layers if fault.overlap == "overlapping-selections" else ()
    return next((at for e in layers if (at := reader.rank.location(e.site))), reader.made_at)


def _steps(rank: Rank, given: Inputs, same: EqualInputs) -> Steps:
    """The steps of the forwards compared, counted by the optimizer that took the most."""
    done = rank.of(StepDone)
    most = max((e.optimizer for e in done), key=rank.steps_of, default=-1)
    ends = sorted(e.at for e in done if e.optimizer == most for _ in range(e.count))
    events = (given.by_rank[rank.rank][n] for n in same.forwards)
    found = {bisect(ends, e.at) for e in events}
    return Steps(min(found), max(found), len(found), len(found))


def _evidence(fault: LoaderFault) -> Evidence:
    """Figures beyond those of the audit."""
    common, of = fault.compared
    if fault.overlap == "equal-random-generators":
        return {
            "generators in the same state": list(fault.generators) or "the dataset's own",
            "the dataset uses the index": not fault.readers[0].seen.indexless,
            "equal samples at equal positions": fault.equal_samples,
            "equal batches given to the model": fault.equal_batches,
        }
    if fault.overlap == "unsharded-workers":
        return {
            "workers": fault.readers[0].seen.workers,
            "delivered by several workers": f"{common} of {of} samples compared",
            "batches": {r.rank.rank: r.epochs[0].batches for r in fault.readers},
        }
    if of:
        return {
            "samples compared": of,
            "delivered by several ranks": common,
            "workers of one rank overlap too": fault.workers_overlap,
            "batches": {r.rank.rank: r.epochs[fault.first_epoch].batches for r in fault.readers},
            **({"from epoch": fault.first_epoch} if fault.first_epoch else {}),
        }
    return {
        **({"selected by each rank": fault.selections} if fault.selections else {}),
        **({"shared samples by epoch": fault.shared_by_epoch} if fault.shared_by_epoch else {}),
        **({"samples are made of": ", ".join(fault.sources)} if fault.sources else {}),
    }


def _cause(fault: LoaderFault) -> str:
    seen = fault.readers[0].seen
    if fault.overlap == "equal-random-generators":
        which = listed(fault.generators)
        return (
            f"{seen.dataset} picks samples at random, whatever the index, and "
            + (f"the generator of {which}" if which else "its random generator")
            + " is in the same state on all of these ranks"
        )
    if fault.overlap == "overlapping-selections":
        return (
            "the ranks select overlapping parts of one dataset: "
            f"{on_each_rank(fault.selections.items())}"
        )
    if fault.overlap == "different-shuffles":
        return (
            f"the shares that {seen.sampler} yields overlap, by another number of samples in each "
            f"epoch ({some(fault.shared_by_epoch, 6)}): the ranks seem to shuffle differently"
        )
    if fault.overlap == "overlapping-shares":
        return f"the shares that {seen.sampler} yields overlap"
    if fault.overlap == "repeated-parts":
        return (
            f"{_sets(fault.parts)} deliver the same part of {seen.dataset}, others another one: "
            "there are fewer parts than ranks, or some ranks draw theirs from the same seed"
        )
    who = "each rank iterates the whole dataset"
    if fault.overlap == "unsharded-workers":
        who = "each worker iterates everything that its rank reads"
    return f"{who}: no sampler applies to {seen.dataset}, which is iterable"


def _sets(parts: tuple[tuple[int, ...], ...]) -> str:
    """`ranks 0,2 and ranks 1,3`."""
    named, rest = list(map(ranks_text, parts[:SETS_NAMED])), len(parts) - SETS_NAMED
    return " and ".join([*named, f"{rest} more sets of ranks"] if rest > 0 else named)


def _fix(fault: LoaderFault) -> str:
    seen = fault.readers[0].seen
    if fault.overlap == "equal-random-generators":
        drawn = equal_generators(fault.readers)
        return drawn.fix if drawn else f"add the rank to the seed that {seen.dataset} draws from"
    if fault.overlap == "repeated-parts" and not seen.iterable:
        return (
            "select the part, or the seed, of each rank by `rank` itself; or load the whole "
            "dataset on every rank and shard it: `DataLoader(dataset, "
            "sampler=DistributedSampler(dataset))`"
        )
    if fault.overlap == "overlapping-selections":
        return (
            "let each rank select its own part: `indices[rank::world_size]`, or `indices[rank * n: "
            "(rank + 1) * n]` with `n = len(indices) // world_size`"
        )
    if fault.overlap == "different-shuffles":
        return (
            "shuffle equally on all ranks, by `seed + epoch` without the rank, and let each rank "
            "take its own share of that order"
        )
    if fault.overlap == "overlapping-shares":
        return "let each rank take its own share of one order: `indices[rank::world_size]`"
    return _shard_stream(fault)


def _shard_stream(fault: LoaderFault) -> str:
    """How to shard an iterable dataset by rank and worker, or by worker alone."""
    workers = fault.overlap == "unsharded-workers"
    code = (
        "`info = get_worker_info()`, `n, i = (info.num_workers, info.id) if info else (1, 0)`, "
        + (
            "`islice(samples, i, None, n)`"
            if workers
            else "`islice(samples, rank * n + i, None, world_size * n)`"
        )
    )
    by_worker = all(r.seen.workers > 1 for r in fault.readers) and not fault.workers_overlap
    if not workers and by_worker:
        code = (
            "if it already shards by worker, use `rank * info.num_workers + info.id` for `info.id` "
            "and `world_size * info.num_workers` for `info.num_workers`; if it does not, "
            f"{code}"
        )
    if fault.overlap == "repeated-parts":
        return (
            "assigning parts by rank (`parts[rank::world_size]`) works only if their number is a "
            "multiple of the number of ranks; otherwise let every rank iterate all parts and take "
            f"its own samples: {code}"
        )
    function = "split_by_worker" if workers else "split_by_node"
    return (
        f"if the dataset is from a library, use its own function for it (`{function}`); otherwise "
        f"in `{fault.readers[0].seen.dataset}.__iter__`: {code}"
    )
