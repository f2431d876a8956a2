"""DDP502."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, cast

from ddpdoctor.analysis.data.fault import LoaderFault
from ddpdoctor.analysis.data.loader_check import (
    LoaderCheck,
    by_accelerate,
    dataset,
    figures,
    no_loader,
    related,
    since,
)
from ddpdoctor.analysis.data.loaders import Reader
from ddpdoctor.analysis.meshes import mesh_drift
from ddpdoctor.events import GroupReady, SamplerRefused
from ddpdoctor.report.declarations import Condition, Effect, When, unless
from ddpdoctor.report.findings import Finding, FixKind, Related, Severity
from ddpdoctor.run import Rank, Run, fold_ranks, plural, ranks_do, ranks_text, some

SPLIT = "split-layers"
DIMENSIONS = "mesh dimensions"
"""The evidence that names the dimensions over which layers are split."""

FIX = "omit both (torch takes them from the default group), or pass them: `DistributedSampler(\
dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank())`"

FIX_SMALLER = "pass size and rank of the group that averages gradients, as torch takes them from \
the default group: `DistributedSampler(dataset, num_replicas=dist.get_world_size(group), \
rank=dist.get_rank(group))`"


class SamplerRankMismatch(LoaderCheck):
    """The sampler's rank or number of replicas is not that of the group

    ## What it finds
    A `DistributedSampler` (or one like it) whose `num_replicas` and `rank` do not shard the data
    over the ranks that average gradients: a constant rank, the local rank on several nodes, the
    number of devices of one node, the default of another group. With `fully_shard` over a
    two-dimensional mesh, these are all of its ranks, replicas and shards. Of models whose layers
    are split over a dimension of a mesh (tensor parallelism), samplers or shuffles that give other
    samples to the ranks along it. Also the swapped form
    `DistributedSampler(dataset, rank, world_size)`, which torch rejects with a message about the
    wrong argument.

    ## How it knows
    When the loader is first iterated, each rank records the `num_replicas` and `rank` of its
    sampler; an error in the sampler's constructor is recorded with its arguments. They are compared
    with the group over which the wrapped model averages gradients (the default group if there is no
    wrapper), and with all other groups that the ranks have made. The indices delivered (all of them
    up to 262,144 per line that makes the loader, then one in 2, in 4 and so on) tell how many
    samples several ranks read, and how many none. Where layers are split, the orders of the indices
    are compared along the dimension, and the gradients of what its ranks hold alike show that they
    computed on other inputs. The finding is proven.

    ## Why it hurts
    Ranks read the same part of the data, or no rank reads some part of it.

    ## How to fix it
    Omit both, and torch takes them from the default group: `DistributedSampler(dataset)`. For a
    sub-group or a custom sampler, pass them: `num_replicas=dist.get_world_size(group),
    rank=dist.get_rank(group)`.

    ## When it stays quiet
    The sampler shards the data

    - over a sub-group that exists (unless more ranks than it has average gradients and train on the
      same samples)
    - over the data-parallel ranks of a mesh, as ranks of one tensor-parallel group share their part
      on purpose
    - over the ranks in another order
    - over more ranks than average gradients, if these exchange more than a few numbers

    or every rank evaluates everything with `num_replicas=1`.
    """

    code = "DDP502"
    name = "sampler-rank-mismatch"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "swapped-arguments": "torch rejects the sampler: rank and num_replicas are swapped",
        "invalid-rank": "torch rejects the sampler's rank",
        "wrong-group": "num_replicas and rank do not match the group that averages gradients",
        SPLIT: "ranks over which layers are split (tensor parallelism) read different samples",
    }
    requires = (unless(no_loader, SamplerRefused),)
    effects = (
        Effect(
            ("first-failure",), of=("swapped-arguments", "invalid-rank"), when=(When.SAME_LINE,)
        ),
        Effect(("uneven-batches", "sampler-padding-duplicates")),
        Effect(
            ("parameter-drift",),
            of=(SPLIT,),
            rules=(mesh_drift.RULE,),
            when=(
                Condition(
                    "along these dimensions",
                    lambda mine, other: (
                        other.evidence.get(mesh_drift.DIMENSION)
                        in cast("list[str]", mine.evidence[DIMENSIONS])
                    ),
                ),
            ),
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from self._refused(run)
        for fault in self.faults(run):
            yield self._split(fault) if fault.rule == SPLIT else self._report(run, fault)

    def _refused(self, run: Run) -> Iterator[Finding]:
        """The finding of a sampler whose constructor raised, and that ended the program."""
        fatal = [
            (rank, event)
            for rank in run.ranks.values()
            for event in rank.of(SamplerRefused)
            if rank.exception is not None and event.error in rank.exception.message
        ]
        if not fatal:
            return
        rank, event = fatal[0]
        swapped = event.world_size >= 0 and (event.replicas, event.rank) == (
            event.group_rank,
            event.world_size,
        )
        yield self.finding(
            rule="swapped-arguments" if swapped else "invalid-rank",
            ranks=tuple(r.rank for r, _ in fatal),
            subjects=("DistributedSampler",),
            location=rank.location(event.site),
            label="rank and num_replicas are swapped" if swapped else "no such rank",
            summary=f"DistributedSampler got num_replicas={event.replicas}, rank={event.rank} on "
            f"rank {event.group_rank} of {event.world_size}"
            + (": the arguments are swapped" if swapped else ""),
            cause="the order of the arguments is (dataset, num_replicas, rank); torch's message "
            f"'{event.error}' is misleading"
            if swapped
            else f"torch rejects it: {event.error}",
            fix=FIX,
            fix_kind=FixKind.SAFE,
            evidence={
                "torch's message": " / ".join(dict.fromkeys(e.error for _, e in fatal)),
                "num_replicas": event.replicas,
                "rank": event.rank,
                "world size": event.world_size,
            },
            at=rank.wall(event.at),
        )

    def _split(self, fault: LoaderFault) -> Finding:
        reader = fault.readers[0]
        dims, rest = (cast("list[str]", fault.facts[key]) for key in ("dims", "rest"))
        lines = cast("list[tuple[int, ...]]", fault.facts["lines"])
        groups = cast("list[tuple[int, ...]]", fault.facts["groups"])
        over = f"mesh {plural(len(dims), 'dimension')} {some(dims)}"
        if groups:
            over = "the ranks of a process group"
        reads = ", ".join(f"ranks {fold_ranks(line)}" for line in lines[:4])
        given = {r.rank.rank: (r.seen.replicas, r.seen.sampler_rank) for r in fault.readers}
        named = f'mesh["{rest[0]}"]' if len(rest) == 1 else "mesh"
        heads = {r.rank.rank: list(e.head[:4]) for r in fault.readers if (e := r.epochs[0].ended)}
        distributed = all(r.seen.distributed for r in fault.readers)
        apart = (
            "each rank of them takes another part of the data"
            if distributed
            else ("each of them shuffles in an order of its own")
        )
        again = reader.seen.batch_sampler
        if not again or any(len({given[n] for n in line}) > 1 for line in lines):
            again = ""
        if again:
            apart = f"{again} divides the batches of their sampler over all ranks once more"
        made = (None if again else reader.sampler_at) or reader.made_at
        shown = (one for one in related(reader, sampler=False) if one.location != made)
        return self.of_reader(
            reader,
            rule=SPLIT,
            ranks=fault.ranks,
            location=made,
            label="gives other samples to ranks that compute parts of one result",
            related=tuple(shown),
            summary=f"{reads} read different samples of {dataset(reader)}, although layers are "
            f"split between them over {over}",
            cause=f"layers are split over {over}, so that its ranks compute parts of one result "
            f"and need equal inputs, but {apart}; gradients of what they hold alike differ",
            fix=_once(reader)
            if again
            else (
                f"`DistributedSampler(dataset, num_replicas={named}.size(), "
                f"rank={named}.get_local_rank())`, which divides the data over the other ranks only"
                if rest
                else f"`DistributedSampler(dataset, num_replicas={len(groups)}, "
                f"rank={_number_of_group(groups)})`, which divides the data over the "
                f"{len(groups)} groups and gives the ranks of each the same samples"
                if len(groups) > 1
                else "use the same order on all ranks, without a distributed sampler: `DataLoader("
                "dataset, shuffle=True, generator=generator)`, with one `generator = "
                "torch.Generator().manual_seed(0)` that is made before the epochs"
            ),
            evidence={
                **({"(num_replicas, rank)": given} if distributed else {}),
                "first indices": heads,
                DIMENSIONS: dims,
            },
        )

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, _odd(fault)
        assert audit is not None
        given = {r.rank.rank: (r.seen.replicas, r.seen.sampler_rank) for r in fault.readers}
        among = f"among {ranks_text(audit.epochs)}, " if len(audit.epochs) < len(given) else ""
        default = run.everyone[reader.rank.rank].default_group
        smaller = default is not None and set(audit.epochs) < set(default.ranks)
        model_parallel = _model_parallel(reader.rank, set(audit.epochs)) if smaller else ()
        wrong = _wrong(fault.readers, run.world_size)
        ranks = tuple(r.rank.rank for r in wrong)
        return self.of_reader(
            reader,
            rule="wrong-group",
            ranks=ranks,
            location=reader.sampler_at,
            label="num_replicas and rank do not match the group",
            related=(*_group(reader.rank, set(audit.epochs)), *related(reader, sampler=False)),
            summary=f"{ranks_do(ranks, 'build')} the sampler of {dataset(reader)} with "
            f"{_arguments(wrong)}: "
            f"{among}{len(audit.shared)} samples are read by several ranks"
            + (f", {audit.never} by none" if audit.complete and audit.never else "")
            + since(reader),
            cause=f"{len(audit.epochs)} ranks average their gradients, so each needs "
            f"num_replicas={len(audit.epochs)} and a distinct rank below that"
            + (
                f", or the same rank on {ranks_text(model_parallel)} if these share one model"
                if model_parallel
                else ""
            )
            + _of_another_group(reader, len(audit.epochs)),
            fix=_fix(reader, smaller=smaller),
            evidence={"(num_replicas, rank)": given, **figures(audit)},
        )


def _once(reader: Reader) -> str:
    """What to do about a batch sampler that divides what the sampler already divides."""
    if by_accelerate(reader):
        return (
            "do not pass this loader to `Accelerator.prepare`: its sampler already divides the data"
        )
    return f"leave out {reader.seen.batch_sampler}: the sampler already divides the data"


def _fix(reader: Reader, *, smaller: bool) -> str:
    """The arguments to pass; `smaller`: not all ranks average their gradients together."""
    if reader.seen.sampler == "DistributedSampler":
        return FIX_SMALLER if smaller else FIX
    group = "group" if smaller else ""
    return (
        f"pass `dist.get_world_size({group})` to {reader.seen.sampler} as its number of replicas, "
        f"and `dist.get_rank({group})` as its rank"
        + (", where `group` is the one that averages gradients" if smaller else "")
    )


def _of_another_group(reader: Reader, averaging: int) -> str:
    """Which smaller group of this rank the sampler's arguments are of; empty for none."""
    given = reader.seen.replicas, reader.seen.sampler_rank
    groups = (g.ranks for g in reader.rank.of(GroupReady) if g.member and len(g.ranks) > 1)
    mine = (r for r in groups if (len(r), sorted(r).index(reader.rank.rank)) == given)
    found = next((ranks for ranks in mine if len(ranks) < averaging), None)
    return f"; the arguments are those of the group of {ranks_text(found)}" if found else ""


def _odd(fault: LoaderFault) -> Reader:
    """The first rank whose sampler has another rank than its own."""
    return next((r for r in fault.readers if r.seen.sampler_rank != r.rank.rank), fault.readers[0])


def _wrong(readers: list[Reader], world_size: int) -> list[Reader]:
    """Those whose samplers have another rank than their own, where all ranks share the data; else
    all of them."""
    if any(r.seen.replicas != world_size for r in readers):
        return readers
    return [r for r in readers if r.seen.sampler_rank != r.rank.rank] or readers


def _arguments(readers: list[Reader]) -> str:
    """`num_replicas=2 and rank=0`, or `rank=0, 1, 0 and 1` where they differ."""
    replicas = [r.seen.replicas for r in readers]
    taken = [r.seen.sampler_rank for r in readers]
    return f"num_replicas={_values(replicas)} and rank={_values(taken)}"


def _values(given: list[int]) -> str:
    return str(given[0]) if len(set(given)) == 1 else some(given, 8)


def _model_parallel(rank: Rank, averaging: set[int]) -> tuple[int, ...]:
    """A group of which only this rank averages gradients with `averaging`: the model may be split
    over its ranks."""
    groups = (g.ranks for g in rank.of(GroupReady) if g.member and len(g.ranks) > 1)
    return next((ranks for ranks in groups if averaging & set(ranks) == {rank.rank}), ())


def _group(rank: Rank, averaging: set[int]) -> tuple[Related, ...]:
    """The line that made the group that averages gradients, or else the default group."""
    own = (g for g in rank.of(GroupReady) if g.member and set(g.ranks) == averaging and g.site >= 0)
    group = next(own, rank.default_group)
    spot = rank.location(group.site) if group else None
    return (Related(f"group of {len(group.ranks)} made here", spot),) if group and spot else ()


def _number_of_group(groups: list[tuple[int, ...]]) -> str:
    """An expression for the number of a rank's group, the first one being 0."""
    size = len(groups[0])
    if groups == [tuple(range(n * size, (n + 1) * size)) for n in range(len(groups))]:
        return f"dist.get_rank() // {size}"
    return "number_of_its_group"
