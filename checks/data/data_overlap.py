"""DDP507."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.audit_table import audit_table
from ddpdoctor.analysis.data.fault import LoaderFault, how_to_shard
from ddpdoctor.analysis.data.forward_inputs import (
    EqualGradients,
    EqualInputs,
    equal_gradients,
    equal_inputs,
    equal_parts,
    inputs,
    inputs_drawn_alike,
)
from ddpdoctor.analysis.data.loader_check import (
    LoaderCheck,
    Words,
    dataset,
    doubt,
    figures,
    no_loader,
    on_each_rank,
    related,
    seeded_here,
    since,
    steps_from,
    use,
    when,
)
from ddpdoctor.analysis.data.loader_faults import faults
from ddpdoctor.analysis.data.rng_state import NAMES, all_seeded_alike, fix_of, parted, seeded_alike
from ddpdoctor.analysis.data.streams import orders_of_its_own
from ddpdoctor.events import Averaged, ForwardInput, StepDone
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Confidence, Finding, Severity, Steps, Table
from ddpdoctor.run import Location, Rank, Run, counted, listed, ranks_text, some, whom

SHARD_INPUTS = (
    "shard the data: `data[rank::world_size]`; if positions are drawn at random, seed what draws "
    "them with the rank: `torch.manual_seed(seed + rank)` after the model is built, or "
    "`manual_seed(seed + rank)` of the generator that is passed"
)

SETS_NAMED = 3
"""Most sets of ranks that a summary names."""


GENERATIONS = "equal-generations"


class DataOverlap(LoaderCheck):
    """Ranks, or the workers of one rank, consume the same samples

    ## What it finds
    Ranks that train on the same samples for another reason than a missing or misconfigured
    `DistributedSampler`:

    - an `IterableDataset` that is not sharded by rank or by worker
    - ranks that read the same files, also where each holds a list of its own, which a set, a
      listing, a shuffle or `hash` made in each process
    - a loader that is continued on all ranks from the state of one rank's loader (torchdata's
      `StatefulDataLoader`), although each rank made a dataset of its own
    - a stream of files or parts of which each rank takes its share from an order of its own
    - a custom sampler whose shares overlap, or that gives each rank most of the data; shares of a
      stream (of whole files, say) that each rank shuffles in an order of its own
    - parts of one dataset (`Subset`, slices of a list) that each rank selects and that overlap
    - data that should differ between ranks but is the same on some of them
    - samples that are picked at random, from a generator in the same state on all ranks
    - samples that every rank reads several times, to draw other inputs from them each time (answers
      to a prompt), where all ranks draw the same
    - a loop without a loader that feeds the same slices or the same random positions (always, for a
      while, or each rank some forwards later), or of several inputs one that is the same on all
      ranks while others differ (a warning)

    Also where this begins only later in the run.

    ## How it knows
    With loaders, the delivered indices are compared between the ranks (all of them up to 262,144
    per line that makes the loader, then one in 2, in 4 and so on), and so are digests of some 256
    samples of epochs 0, 1, 2, 4, 8 and so on. Streams have no indices; of these, all rows of an
    epoch of at most 4096 are digested, too. Of the first 16,384 rows of such an epoch up to 1024
    are kept, chosen by their own digests: ranks that deliver the same rows in another order choose
    the same ones. What a `Subset` selects is recorded up to 16,384 samples, regular selections up
    to 262,144.

    Without loaders, the inputs of wrapped models, and of models of `fully_shard`, are compared, at
    the first 16 forwards, then at every eighth and ever fewer. Inputs that come some forwards apart
    count if eight do, each once on a rank, and a global generator is in the same state then.
    Without a wrapper, it is some values of each rank's own gradients before the program
    synchronises them, in four steps. Only host memory is read.

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
    - Each rank draws its stream with replacement, from a random state of its own.
    - Selections overlap by little, or all ranks have some samples in common.
    - No step applies what equal inputs give (a warm-up), or each rank computes another loss from
      them, and the model draws no random numbers: each takes other parts of them.
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
    severity = Severity.ERROR
    words: ClassVar[Mapping[str, Words]] = {
        "unsharded-stream": Words(
            "all ranks iterate the whole of an iterable dataset",
            "each rank reads the same samples: no sampler applies to {kind}, which is iterable",
            "{shard}; where {kind} draws its samples at random, add the rank to its seed instead",
        ),
        "equal-draws": Words(
            "all ranks draw the same samples of a stream, with replacement",
            "{kind} draws its samples at random, in the same order on these ranks: it is seeded "
            "alike on each",
            "add the rank, and the worker's number where there are workers, to the seed that "
            "{kind} draws from",
            "draws the same samples on these ranks",
        ),
        "equal-stream-draws": Words(
            "all ranks deliver the same samples of a stream, and draw equal random numbers for it",
            "{generator} is in the same state on these ranks, and loading {kind} draws from it: "
            "samples that are drawn at random are the same draws on each rank",
            "{seed}; if the samples are not drawn but read, shard them: {shard}",
            "draws the same samples on these ranks",
        ),
        "restored-alike": Words(
            "all ranks continue a stream from the state of one rank's loader",
            "the loader was given the same state on these ranks: each goes on where the rank "
            "stopped that saved it, with the part of {kind} that was that rank's",
            "save the loader's state on every rank, in a file of its own "
            "(`torch.save(loader.state_dict(), f'loader-{{rank}}.pt')`), and load that one; a "
            "checkpoint with the state of one rank cannot continue the others",
            "given the same state on these ranks",
        ),
        "unsharded-workers": Words(
            "the workers of one rank each iterate the whole of its dataset",
            "each worker iterates everything that its rank reads: no sampler applies to {kind}, "
            "which is iterable",
            "{shard}",
            "not sharded by worker",
        ),
        "repeated-parts": Words(
            "some ranks deliver the same samples, while others deliver other ones",
            "{sets} deliver the same part of {kind}, others another one: there are fewer parts "
            "than ranks, or some ranks draw theirs from the same seed",
            "{shard}",
        ),
        "equal-random-generators": Words(
            "the dataset picks samples at random, equally on all ranks",
            "{kind} picks samples at random, whatever the index, and {generator} is in the same "
            "state on all of these ranks",
            "{seed}",
            "picks the same samples on these ranks",
        ),
        GENERATIONS: Words(
            "ranks read each sample several times, and make the same inputs of it",
            "each rank reads every sample {times} times, to draw other inputs from it each time, "
            "but the ranks' random generators are in the same state: they draw the same",
            "`torch.manual_seed(seed + rank)` after the model is built, so that each rank draws "
            "inputs of its own",
            "makes the same inputs of these samples on all ranks",
        ),
        "overlapping-selections": Words(
            "the ranks select parts of one dataset that overlap",
            "the ranks select overlapping parts of one dataset: {selections}",
            "let each rank select its own part: `indices[rank::world_size]`, or `indices[rank * n: "
            "(rank + 1) * n]` with `n = len(indices) // world_size`",
        ),
        "different-shuffles": Words(
            "the ranks shuffle in different orders and each takes its share of its own",
            "the shares that {sampler} yields overlap, {apart}: each rank takes its share of an "
            "order of its own, shuffled or listed differently{parted}",
            "make the order the same on all ranks before it is divided, also that of a sampler "
            "inside of this one: shuffle by `seed + epoch` without the rank, from a generator of "
            "its own, sort what was listed; then each rank takes its share of it",
        ),
        "undivided": Words(
            "each rank reads most of the data: the sampler does not divide it",
            "the ranks read {delivered} samples together, of {length} that there are: {sampler} "
            "yields each of them samples of the whole data set, and of no share of it",
            "bring the samples, or the groups that stay together, into one order on all ranks (by "
            "`seed + epoch`, without the rank), cut it to a multiple of the ranks, and let each "
            "take `order[rank::world_size]`",
            "yields samples of the whole data set",
        ),
        "overlapping-streams": Words(
            "ranks deliver partly the same samples of a stream",
            "the parts of {kind} that the ranks deliver overlap: each rank takes its part from an "
            "order of its own{files}",
            "bring the files, or the parts, into one order on all ranks before each takes its "
            "share: `Random(seed).shuffle(files)` without the rank in the seed, then "
            "`files[rank::world_size]`",
            "delivers partly the same samples on these ranks",
        ),
        "overlapping-lists": Words(
            "the lists of files, or of parts, that the ranks read overlap",
            "of the {every} entries of `{list}` that the ranks hold together, {several} are in the "
            "lists of several ranks: {order}",
            "{same}",
            "reads files, or parts, that other ranks read too",
        ),
        "overlapping-shares": Words(
            "the sampler yields some samples on several ranks",
            "the shares that {sampler} yields overlap",
            "let each rank take its own share of one order: `indices[rank::world_size]`",
        ),
        "equal-inputs": Words(
            "without a loader, ranks feed a model the same inputs",
            "each of these ranks takes the same samples from the same data, or makes its inputs "
            "from equal random numbers",
            SHARD_INPUTS,
        ),
        "equal-part-of-inputs": Words(
            "without a loader, one of several inputs is the same on all ranks, and others differ",
            "this input comes from the same samples on every rank, in the same order; what differs "
            "was added to it at random on each",
            SHARD_INPUTS,
        ),
        "equal-random-inputs": Words(
            "without a loader, ranks feed a model equal random numbers",
            "each rank takes the same samples, or draws the same random positions: the ranks' "
            "random generators are in the same state",
            SHARD_INPUTS,
        ),
        "constant-inputs": Words(
            "without a loader, ranks feed a model equal inputs that never change",
            "every rank trains on the same constant data, as a single rank would",
            SHARD_INPUTS,
        ),
        "inputs-drawn-alike": Words(
            "without a loader, ranks draw the same inputs, for a while or some forwards apart",
            "each rank takes the same samples, or draws the same random positions, as its random "
            "generators are seeded like those of the others: they only part where one rank draws "
            "more than another, as in an evaluation of its own",
            SHARD_INPUTS,
        ),
        "equal-gradients": Words(
            "without DDP, ranks compute the same gradients before they exchange them",
            "each of these ranks trains on the same samples, so they do the work of one",
            "shard the data: `data[rank::world_size]`; if samples are drawn at random, add the "
            "rank to the seed",
        ),
    }
    rules = when(words)
    effects = (
        Effect(("identical-augmentation",), of=(GENERATIONS,)),
        Effect(("identical-augmentation",), of=("equal-random-generators", "equal-stream-draws")),
        Effect(("uneven-batches",), of=("different-shuffles", "undivided"), when=(When.SAME_LINE,)),
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
        for fault in self.faults(run):
            yield self._of_loader(run, fault)
        for given in inputs(run):
            found_equal = list(equal_inputs(run, given)) or list(equal_parts(run, given))
            if sets := [same for same in found_equal if not same.intended]:
                yield self._of_inputs(run, sets)
            elif not found_equal:
                for same in inputs_drawn_alike(run, given):
                    yield self._of_inputs(run, [same])
        for work in () if found else equal_gradients(run):
            yield self._of_gradients(run, work)

    def tables(self, run: Run) -> Iterator[Table]:
        yield from audit_table(run)

    def _of_loader(self, run: Run, fault: LoaderFault) -> Finding:
        reader, audit = fault.readers[0], fault.audit
        workers = fault.rule == "unsharded-workers"
        number = fault.first_epoch
        who = _sets(fault.parts) if len(fault.parts) > 1 else whom(fault.ranks, run.world_size)
        who = f"the workers of {who}" if workers else who
        what = "the same samples"
        if audit is not None:
            what = f"the same {len(audit.shared)} of {audit.distinct} samples"
        elif fault.rule == "overlapping-lists":
            what = "samples of the same files or parts ({several} of {every})".format(**fault.facts)
        elif fault.rule == "overlapping-streams":
            what = "partly the same samples ({} of {} compared)".format(*fault.compared)
        elif fault.compared[1] and not workers:
            what = "the same samples ({} of {} compared)".format(*fault.compared)
        # The batches of all ranks, also where several sets of ranks have the same fault.
        batches = {r.rank.rank: r.epochs[number].batches for r in fault.readers}
        evidence = {**fault.evidence, **({"batches": batches} if fault.compared[1] else {})}
        evidence |= {"from epoch": number} if number else {}
        return self.of_fault(
            fault,
            _facts(fault),
            note=not fault.loader.trains,
            steps=steps_from(reader, reader.epoch(number)),
            location=_spot(fault),
            label="gives each rank a list of its own"
            if orders_of_its_own(fault)
            else self.words[fault.rule].label or "ranks get the same samples",
            related=(
                *related(reader),
                *seeded_here(fault.generators.seeding if fault.generators else None),
            ),
            summary=f"{who} deliver {what} of {dataset(reader)} in {use(fault.loader)}"
            f"{since(reader, number)}{doubt(fault)}"
            + (", and make the same inputs of them" if fault.rule == GENERATIONS else ""),
            evidence={**(figures(audit) if audit else {}), **evidence},
        )

    def _of_inputs(self, run: Run, sets: list[EqualInputs]) -> Finding:
        """The finding that ranks, in one or several sets, train a model on the same inputs."""
        same = min(sets, key=lambda s: s.toy)
        parts = tuple(s.ranks for s in sets if s.toy == same.toy)
        rank, words = run.everyone[same.ranks[0]], self.words[same.rule]
        who = _sets(parts) if len(parts) > 1 else whom(same.ranks, run.world_size)
        known = [run.everyone[n] for n in same.ranks] if same.drawn or same.generator else []
        names = (same.generator,) if same.generator else NAMES
        seeding = seeded_alike(known, names, same.event.at) if known else None
        return self.finding(
            rule=same.rule,
            severity=Severity.NOTE
            if same.toy
            else Severity.WARNING
            if same.part >= 0
            else Severity.ERROR,
            confidence=Confidence.SUSPECTED if same.toy or same.part >= 0 else Confidence.PROVEN,
            ranks=tuple(sorted({r for ranks in parts for r in ranks})),
            subjects=(f"inputs of {same.kind}",),
            location=rank.location(same.event.site),
            steps=_steps(rank, same) if same.late else None,
            label="the same inputs on these ranks",
            related=seeded_here(seeding),
            summary=f"{who} feed {same.kind} the same {_inputs(same)} {_when(same)}"
            + (f" from forward {same.forwards[0]} on" if same.late else "")
            + (" (equal random numbers)" if same.drawn else "")
            + (" (they never change)" if same.constant else ""),
            cause=words.cause,
            fix=seeding.fix if seeding is not None else words.fix,
            evidence={
                "forwards compared": some(same.forwards, 20),
                **({"differed last at": same.differed} if same.late else {}),
                "digests": [f"{e.digest:08x}" for e in same.events[:8]],
                "numbers per input": same.event.numbers,
                **({"inputs are random": same.drawn} if same.drawn else {}),
            },
            at=rank.wall(same.event.at),
        )

    def _of_gradients(self, run: Run, work: EqualGradients) -> Finding:
        rank = run.everyone[work.ranks[0]]
        sure = work.seen and not (work.drawn or work.constant)
        count = len(work.steps)
        ranks = [run.everyone[n] for n in work.ranks]
        seedings = all_seeded_alike(ranks, work.event.at)
        inputs = rank.location(work.event.site)
        return self.finding(
            rule="equal-gradients",
            severity=Severity.ERROR if sure else Severity.NOTE,
            confidence=Confidence.PROVEN if sure else Confidence.SUSPECTED,
            ranks=work.ranks,
            steps=Steps(work.steps[0], work.steps[-1], count, count),
            subjects=(work.kind,),
            location=inputs or rank.location(work.event.backward_site),
            label=f"the same {'inputs' if inputs else 'gradients'} on these ranks",
            related=seeded_here(*seedings),
            summary=f"the local gradients of {work.kind}, before any exchange, are bit-identical "
            f"on {whom(work.ranks, run.world_size)} in all {count} compared steps"
            + (" (from equal random inputs)" if work.drawn else "")
            + (" (from inputs that never change)" if work.constant else ""),
            cause=self.words["equal-gradients"].cause,
            fix=fix_of(seedings) if seedings else self.words["equal-gradients"].fix,
            evidence={
                "steps compared": work.steps,
                "first gradient values": [float(f"{v:.6g}") for v in work.event.local[:8]],
                "inputs are known to be equal": work.seen,
                "inputs are random": work.drawn,
            },
            at=rank.wall(work.event.at),
        )


def _when(same: EqualInputs) -> str:
    if same.apart is None:
        return f"at all {len(same.forwards)} compared forwards"
    share = f"{len(same.forwards)} of {same.compared} compared"
    if not same.apart:
        return f"at the first {share} forwards"
    first, *others = same.ranks
    late, early = ([first], others) if same.apart > 0 else (others, [first])
    return (
        f"some forwards apart: {ranks_text(late)} at forward n + {abs(same.apart)} those of "
        f"{ranks_text(early)} at forward n ({share})"
    )


def _spot(fault: LoaderFault) -> Location | None:
    """The line that makes the overlapping `Subset` or that gives the loader its state, or else the
    one that makes the loader."""
    reader = fault.readers[0]
    if orders := orders_of_its_own(fault):
        return orders
    if fault.rule == "restored-alike":
        began = reader.epochs[fault.first_epoch].began
        return reader.rank.location(began.restored_site) or reader.made_at
    layers = reader.seen.layers if fault.rule == "overlapping-selections" else ()
    return next((at for e in layers if (at := reader.rank.location(e.site))), reader.made_at)


def _steps(rank: Rank, same: EqualInputs) -> Steps:
    """The steps of the forwards compared, counted by the optimizer that took the most."""
    done = rank.of(StepDone)
    most = max((e.optimizer for e in done), key=rank.steps_of, default=-1)
    ends = sorted(e.at for e in done if e.optimizer == most for _ in range(e.count))
    found = {bisect(ends, e.at) for e in same.events}
    return Steps(min(found), max(found), len(found), len(found))


def _facts(fault: LoaderFault) -> dict[str, object]:
    """What the sentences about a loader are filled in with."""
    drawn, kind = fault.generators, fault.readers[0].seen.dataset
    return {
        "sets": _sets(fault.parts),
        "shard": how_to_shard(fault),
        "parted": f". {apart.text}" if (apart := parted(fault.readers)) else "",
        "generator": f"the generator of {listed(drawn.names)}"
        if drawn and drawn.names
        else "its random generator",
        "seed": drawn.fix if drawn else f"add the rank to the seed that {kind} draws from",
        "files": _files(fault),
        "times": fault.audit.times_within if fault.audit else 0,
        "selections": on_each_rank(fault.selections.items()),
        "apart": _apart(fault),
        "delivered": fault.audit.delivered if fault.audit is not None else 0,
        "length": fault.audit.length if fault.audit is not None else 0,
        **({"sampler": kind} if fault.readers[0].seen.iterable else {}),
    }


def _apart(fault: LoaderFault) -> str:
    """What tells that each rank has an order of its own."""
    if counts := some(fault.shared_by_epoch, 6):
        return f"by another number of samples in each epoch ({counts})"
    never = fault.audit.never if fault.audit else 0
    return f"and {counted(never, 'sample is', 'samples are')} in none"


def _files(fault: LoaderFault) -> str:
    partly = fault.partly
    if partly is None or not partly.files:
        return ""
    return f" ({partly.files} of {partly.read} files are read by several ranks, at {partly.line})"


def _inputs(same: EqualInputs) -> str:
    return "inputs" if same.part < 0 else f"input {same.part + 1} of {len(same.event.parts)}"


def _sets(parts: tuple[tuple[int, ...], ...]) -> str:
    """`ranks 0,2 and ranks 1,3`."""
    named, rest = list(map(ranks_text, parts[:SETS_NAMED])), len(parts) - SETS_NAMED
    return " and ".join([*named, f"{rest} more sets of ranks"] if rest > 0 else named)
