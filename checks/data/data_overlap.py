"""DDP507."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.data.audit_table import audit_table
from ddpdoctor.analysis.data.forward_inputs import (
    EqualInputs,
    Inputs,
    SameWork,
    alike,
    inputs,
    same_work,
)
from ddpdoctor.analysis.data.loader_faults import (
    AGAIN,
    FROM_EPOCH,
    MOVING,
    SELECTED,
    STREAM,
    LoaderFault,
    faults,
    of_check,
)
from ddpdoctor.analysis.data.phrases import (
    dataset,
    figures,
    no_loader,
    related,
    since,
    steps_from,
    use,
)
from ddpdoctor.analysis.data.rng_state import in_step
from ddpdoctor.events import Averaged, ForwardInput, StepDone
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity, Steps, Table
from ddpdoctor.run import Location, Rank, Run, ranks_text, some, whom


class DataOverlap(Check):
    """Ranks, or the workers of one rank, consume the same samples

    ## What it finds
    Ranks that train on the same samples although no sampler is to blame: an `IterableDataset` that
    is not split by rank or by worker, ranks that read the same files, a loop of plain Python that
    takes the same slices or draws the same random positions on every rank, be it only later in the
    run, a sampler of one's own whose shares overlap, parts of one data set (`Subset`, slices of a
    list) that each rank selects and that overlap. Data that each rank has of its own, but for some
    ranks that hold the same. Samples that a data set picks at random, whatever the index, from a
    generator that stands alike on all ranks.

    ## How it knows
    Indices that loaders deliver (all of them up to 262,144 per line that makes the loader, then one
    in 2, in 4 and so on) are compared between the ranks, and digests of some 256 samples of epochs
    0, 1, 2, 4, 8 and so on; of streams, which have no indices, also of all rows of an epoch that
    has no more than 4096. Without a loader it is the inputs of wrapped models, at the first 16
    forwards, then at every eighth and ever fewer; without a wrapper some values of each rank's own
    gradients before the program exchanges them, in four steps. Content is read in host memory only.
    What a `Subset` selects is recorded up to 16,384 samples, at equal distances up to 262,144.
    Parts overlap where the end of one, three in ten samples or more, is the beginning of another,
    or nine in ten are the same, all ranks select from data that is made of the same, and that much
    is read by both. Of lists that each rank holds the digests tell whether one goes on where
    another is not over.
    The finding is proven; suspected where samples could not be looked at, are all alike or change
    each time they are read, and where inputs are not known or seem to be drawn on the spot.

    ## Why it hurts
    The work of several ranks (or workers) is that of one; an epoch sees every sample several
    times.

    ## How to fix it
    In the data set: take every n-th sample, n being ranks times workers, from `dist.get_rank()`
    and `torch.utils.data.get_worker_info()`; of files or other parts each rank can take its own
    (`parts[rank::world_size]`) only where they are as many as the ranks, or a multiple. In a plain
    loop: start at the rank and stride by the world size, or seed the generator of the positions
    with the rank added. Where the data set itself picks at random, too: a `DistributedSampler`
    changes nothing there.

    ## When it stays quiet
    Content that differs; streams that draw with replacement; parts with samples that all ranks are
    to have beside their own, and those that overlap by little; ranks that are handed their inputs
    on purpose (broadcast, scatter) or share them in a tensor-parallel group or as stages of a
    pipeline; ranks that exchange tensors in a process group of their own step by step, or make one
    and hold the same part of the data; samplers that deal out each of some samples equally often,
    to other ranks each time (repeated augmentation). Inputs that never change or are drawn from the
    global random generators on the spot are a note, as is evaluation.
    """

    code = "DDP507"
    name = "data-overlap"
    family = "data"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if (reason := no_loader(run)) is None or any(
            any(e.digest for e in r.of(ForwardInput)) or any(e.alone for e in r.of(Averaged))
            for r in run.ranks.values()
        ):
            return None
        if run.any(ForwardInput):
            return f"{reason}, and no input of a wrapped model was in host memory"
        return (
            f"{reason}, no forward of a wrapped model was seen, and no gradients of a rank's own "
            "before the program exchanges them with all others"
        )

    def examine(self, run: Run) -> Iterable[Finding]:
        found = any(faults(run))
        for fault in of_check(run, self.name):
            yield self._of_loader(run, fault)
        for given in inputs(run):
            if sets := [same for same in alike(run, given) if not same.meant]:
                yield self._of_inputs(run, given, sets)
        for work in () if found else same_work(run):
            yield self._of_gradients(run, work)

    def explains(self, mine: Finding, other: Finding) -> bool:
        alike = other.check == "identical-augmentation" and other.location == mine.location
        return alike and STREAM in mine.evidence

    def tables(self, run: Run) -> Iterator[Table]:
        yield from audit_table(run)

    def _of_loader(self, run: Run, fault: LoaderFault) -> Finding:
        reader, audit = fault.readers[0], fault.audit
        workers = fault.evidence.get("between") == "workers"
        note = bool(fault.doubt) or not fault.loader.trains
        first = fault.evidence.get(FROM_EPOCH, 0)
        number = first if isinstance(first, int) else 0
        who = _sets(fault.parts) if len(fault.parts) > 1 else whom(fault.ranks, run.world_size)
        who = f"the workers of {who}" if workers else who
        if audit is not None:
            what = f"the same {len(audit.shared)} of {len(audit.total)} samples"
        elif workers or STREAM in fault.evidence:
            what = "the same samples"
        else:
            count, of = (
                fault.evidence[k] for k in ("delivered by several ranks", "samples compared")
            )
            what = f"the same samples ({count} of {of} compared)"
        return self.finding(
            severity=Severity.NOTE if note else Severity.ERROR,
            confidence=Confidence.SUSPECTED if fault.doubt else Confidence.PROVEN,
            ranks=fault.ranks,
            steps=steps_from(reader, reader.epoch(number)),
            subjects=(reader.seen.dataset,),
            location=_spot(fault),
            label="not divided among the workers"
            if workers
            else "picks the same samples on these ranks"
            if STREAM in fault.evidence
            else "not divided among the ranks",
            related=related(reader),
            summary=f"{who} deliver {what} of {dataset(reader)} in {use(fault.loader)}"
            f"{since(reader, number)}" + (f" ({fault.doubt})" if fault.doubt else ""),
            cause=_cause(fault, workers=workers),
            fix=_fix(fault),
            evidence={**(figures(audit) if audit else {}), **fault.evidence},
            at=reader.rank.wall(audit.at if audit else reader.epochs[number].began.at),
        )

    def _of_gradients(self, run: Run, work: SameWork) -> Finding:
        rank = run.ranks[work.ranks[0]]
        sure = work.seen and not (work.drawn or work.constant)
        count = len(work.steps)
        return self.finding(
            severity=Severity.ERROR if sure else Severity.NOTE,
            confidence=Confidence.PROVEN if sure else Confidence.SUSPECTED,
            ranks=work.ranks,
            steps=Steps(work.steps[0], work.steps[-1], count, count),
            subjects=(work.kind,),
            location=rank.location(work.event.site),
            label="the same inputs on these ranks",
            summary=f"{whom(work.ranks, run.world_size)} compute the same gradients of "
            f"{work.kind}, bit for bit, in each of {count} steps compared, before they "
            "exchange them"
            + (" (from random numbers, drawn alike on all of them)" if work.drawn else "")
            + (" (from inputs that never change)" if work.constant else ""),
            cause="every rank does the work of one: it takes the same samples from the same data",
            fix="take every n-th sample: `data[rank::world_size]`; where samples are drawn, seed "
            "with the rank added",
            evidence={
                "steps compared": work.steps,
                "for example": [float(f"{v:.6g}") for v in work.event.local[:8]],
                "inputs are known to be the same": work.seen,
                "drawn on the spot": work.drawn,
            },
            at=rank.wall(work.event.at),
        )

    def _of_inputs(self, run: Run, given: Inputs, sets: list[EqualInputs]) -> Finding:
        same = min(sets, key=lambda s: s.toy)
        sets = [s for s in sets if s.toy == same.toy]
        rank = run.ranks[same.ranks[0]]
        parts = tuple(s.ranks for s in sets)
        return self.finding(
            severity=Severity.NOTE if same.toy else Severity.ERROR,
            confidence=Confidence.SUSPECTED if same.toy else Confidence.PROVEN,
            ranks=tuple(sorted({r for ranks in parts for r in ranks})),
            subjects=(f"inputs of {given.kind}",),
            location=rank.location(same.event.site),
            steps=_steps(rank, given, same) if same.late else None,
            label="the same inputs on these ranks",
            summary=f"{_sets(parts) if len(parts) > 1 else whom(same.ranks, run.world_size)} feed "
            f"{given.kind} the same inputs at each of {len(same.forwards)} forwards compared"
            + (f" from number {same.forwards[0]} on" if same.late else "")
            + (" (random numbers, drawn alike on all of them)" if same.drawn else "")
            + (" (they never change)" if same.constant else ""),
            cause="every rank takes the same samples, or draws the same random positions: the "
            "random generators of the ranks stand alike"
            if same.drawn
            else "every rank works on the same, constant data, as one rank would alone"
            if same.constant
            else "every rank takes the same samples from the same data",
            fix="take every n-th sample: `data[rank::world_size]`; where positions are drawn, seed "
            "with the rank added: `torch.manual_seed(seed + rank)` after the model was made",
            evidence={
                "forwards compared": some(same.forwards, 20),
                **({"differed last at": same.differed} if same.late else {}),
                "digests": [
                    f"{given.by_rank[same.ranks[0]][n].digest:08x}" for n in same.forwards[:8]
                ],
                "numbers per input": same.event.numbers,
                "drawn on the spot": same.drawn,
            },
            at=rank.wall(same.event.at),
        )


def _spot(fault: LoaderFault) -> Location | None:
    """The line that selects what a `Subset` holds, or makes the loader."""
    reader = fault.readers[0]
    layers = reader.seen.layers if SELECTED in fault.evidence else ()
    return next((at for e in layers if (at := reader.rank.location(e.site))), reader.made_at)


def _steps(rank: Rank, given: Inputs, same: EqualInputs) -> Steps:
    """The steps of the forwards compared, of the optimizer that took the most."""
    done = rank.of(StepDone)
    most = max((e.optimizer for e in done), key=rank.steps_of, default=-1)
    ends = sorted(e.at for e in done if e.optimizer == most for _ in range(e.count))
    events = (given.by_rank[rank.rank][n] for n in same.forwards)
    found = {bisect(ends, e.at) for e in events}
    return Steps(min(found), max(found), len(found), len(found))


def _cause(fault: LoaderFault, *, workers: bool) -> str:
    seen, moving = fault.readers[0].seen, fault.evidence.get(MOVING)
    if (names := fault.evidence.get(STREAM)) is not None:
        which = " and ".join(names) if isinstance(names, list) else ""
        return (
            f"{seen.dataset} chooses its samples at random, whatever the index, and "
            + (f"the generator of {which}" if which else "the generator that it draws from")
            + " stands alike on all of these ranks"
        )
    if isinstance(chosen := fault.evidence.get(SELECTED), dict):
        reported = ", ".join(
            f"{places} on rank {rank}" for rank, places in list(chosen.items())[:4]
        )
        return f"the parts of one data set that the ranks select for themselves overlap: {reported}"
    if isinstance(moving, list):
        return (
            f"the shares that {seen.sampler} hands out overlap, in another number of samples each "
            f"epoch ({some(moving, 6)}): the ranks seem to shuffle in different orders"
        )
    if not seen.iterable and not fault.parts:
        return f"the shares that {seen.sampler} hands out overlap"
    if fault.parts:
        return (
            f"{_sets(fault.parts)} deliver the same of {seen.dataset}, and others other samples: "
            "the parts that the ranks choose are fewer than the ranks, or are drawn alike"
        )
    what = "each rank iterates the whole of"
    if workers:
        what = "each worker iterates all that its rank reads of"
    return f"{what} {seen.dataset}: no sampler can divide an iterable one"


def _sets(parts: tuple[tuple[int, ...], ...]) -> str:
    """`ranks 0,2 and ranks 1,3`."""
    reported, rest = " and ".join(map(ranks_text, parts[:3])), len(parts) - 3
    return reported + (f" and {rest} more sets of ranks" if rest > 0 else "")


def _fix(fault: LoaderFault) -> str:
    seen = fault.readers[0].seen
    workers = fault.evidence.get("between") == "workers"
    if STREAM in fault.evidence:
        drawn = in_step(fault.readers)
        return drawn.fix if drawn else f"add the rank to the seed from which {seen.dataset} draws"
    if fault.parts and not seen.iterable:
        return (
            "give each rank a part or a seed of its own, by `rank` itself; or load the same whole "
            "data set on every rank and divide it: `DataLoader(dataset, "
            "sampler=DistributedSampler(dataset))`"
        )
    if SELECTED in fault.evidence:
        return (
            "let each rank select its own part: `indices[rank::world_size]`, or `indices[rank * n: "
            "(rank + 1) * n]` with `n = len(indices) // world_size`"
        )
    if MOVING in fault.evidence:
        return (
            "shuffle alike on all ranks, by `seed + epoch` without the rank, and let each rank "
            "take its own share of that order"
        )
    if not seen.iterable:
        return "let each rank take its own share of one order: `indices[rank::world_size]`"
    offered = "split_by_worker" if workers else "split_by_node"
    own = (
        "`info = get_worker_info()`, `n, i = (info.num_workers, info.id) if info else (1, 0)`, "
        + (
            "`islice(samples, i, None, n)`"
            if workers
            else "`islice(samples, rank * n + i, None, world_size * n)`"
        )
    )
    if not workers and all(r.seen.workers > 1 for r in fault.readers) and not fault.evidence[AGAIN]:
        own = (
            "if its workers divide it already, let the rank take part in that: `rank * "
            "info.num_workers + info.id` of `world_size * info.num_workers` in place of `info.id` "
            f"of `info.num_workers`; if not, {own}"
        )
    if fault.parts:
        return (
            "choosing a part by the rank does for as many parts as there are ranks, or a multiple "
            f"(`parts[rank::world_size]`); else let every rank go through all of them, and take "
            f"its own samples: {own}"
        )
    return (
        f"split it by the means of the library that it is from (`{offered}`), if it is from one; "
        f"else in `{seen.dataset}.__iter__`: {own}"
    )
