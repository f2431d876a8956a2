"""DDP502."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.data.loader_faults import LoaderFault, of_check
from ddpdoctor.analysis.data.loaders import Reader
from ddpdoctor.analysis.data.phrases import dataset, figures, no_loader, related, since
from ddpdoctor.events import GroupReady, SamplerRefused
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Rank, Run, ranks_text, whom

FIX = "leave both out (torch asks the group), or name them: `DistributedSampler(dataset, \
num_replicas=dist.get_world_size(), rank=dist.get_rank())`"

FIX_SMALLER = "name the group over which the gradients are averaged, torch asks the default one: \
`DistributedSampler(dataset, num_replicas=dist.get_world_size(group), rank=dist.get_rank(group))`"


class SamplerRankMismatch(Check):
    """The sampler was told another rank or number of ranks than the group has

    ## What it finds
    A `DistributedSampler` (or one like it) whose `num_replicas` and `rank` do not divide the data
    over the ranks that average gradients (with `fully_shard` over a mesh of two dimensions: all of
    its ranks, be they copies or shards): a constant rank, the local rank on several nodes, the
    number of one node's devices, the default of another group. Also the swapped form
    `DistributedSampler(dataset, rank, world_size)`, which torch refuses with a text that blames
    the wrong argument.

    ## How it knows
    When the loader is first iterated, each rank records the `num_replicas` and `rank` of its
    sampler; an error of the sampler's constructor is recorded with the arguments. They are compared
    with the group over which the wrapped model averages gradients (without one: the default group),
    and with all other groups that the ranks have made. The indices that are delivered (all of them
    up to 262,144 per line that makes the loader, then one in 2, in 4 and so on) tell how many
    samples several ranks read, and how many none. The finding is proven.

    ## Why it hurts
    Ranks read the same part, or parts that nobody reads are left over.

    ## How to fix it
    Leave both out, torch asks the group: `DistributedSampler(dataset)`. For a sub-group, or a
    sampler of one's own, name them: `num_replicas=dist.get_world_size(group),
    rank=dist.get_rank(group)`.

    ## When it stays quiet
    Samplers that divide the data over a sub-group that exists (not where more ranks than it has
    average gradients and train on the same samples), over the data-parallel ranks of a mesh (ranks
    of one tensor-parallel group share their part on purpose), over the ranks in another order, or
    over more ranks than average gradients where more than a few numbers go between these;
    evaluation of everything on every rank with `num_replicas=1`.
    """

    code = "DDP502"
    name = "sampler-rank-mismatch"
    family = "data"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(SamplerRefused) else no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from self._refused(run)
        for fault in of_check(run, self.name):
            yield self._report(run, fault)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "first-failure":
            refused = str(mine.evidence.get("refused", ""))
            return bool(refused) and any(t in str(other.evidence) for t in refused.split(" / "))
        return other.check in ("uneven-batches", "sampler-padding-duplicates")

    def _refused(self, run: Run) -> Iterator[Finding]:
        """torch raised in the constructor, and that ended the program."""
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
            ranks=tuple(r.rank for r, _ in fatal),
            subjects=("DistributedSampler",),
            location=rank.location(event.site),
            label="rank and num_replicas are swapped" if swapped else "no such rank",
            summary=f"DistributedSampler got num_replicas={event.replicas}, rank={event.rank} on "
            f"rank {event.group_rank} of {event.world_size}"
            + (": the two are swapped" if swapped else ""),
            cause="the order of the arguments is (dataset, num_replicas, rank); torch's text "
            f"'{event.error}' blames the rank"
            if swapped
            else f"torch refuses it: {event.error}",
            fix=FIX,
            fix_kind=FixKind.SAFE,
            evidence={
                "refused": " / ".join(dict.fromkeys(e.error for _, e in fatal)),
                "num_replicas": event.replicas,
                "rank": event.rank,
                "world size": event.world_size,
            },
            at=rank.wall(event.at),
        )

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, _odd(fault)
        assert audit is not None
        given = {r.rank.rank: (r.seen.replicas, r.seen.sampler_rank) for r in fault.readers}
        among = f"among {ranks_text(audit.epochs)}, " if len(audit.epochs) < len(given) else ""
        default = run.ranks[reader.rank.rank].default_group
        smaller = default is not None and set(audit.epochs) < set(default.ranks)
        beside = _beside(reader.rank, set(audit.epochs)) if smaller else ()
        return self.finding(
            ranks=fault.ranks,
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at,
            label="divides the data over other ranks than there are",
            related=(*_group(reader.rank, set(audit.epochs)), *related(reader, sampler=False)),
            summary=f"the sampler of {dataset(reader)} {_share(reader)} as {_places(fault)} "
            f"on {whom(fault.ranks, run.world_size)}: "
            f"{among}{len(audit.shared)} samples read by several ranks"
            + (f", {audit.never} by none" if audit.complete else "")
            + since(reader),
            cause=f"{len(audit.epochs)} ranks average their gradients; each needs a rank of its "
            f"own below num_replicas={len(audit.epochs)}"
            + (f", the same on {ranks_text(beside)} if these share one model" if beside else "")
            + _of_another(reader, len(audit.epochs)),
            fix=_fix(reader, smaller=smaller),
            evidence={"(num_replicas, rank)": given, **figures(audit)},
            at=reader.rank.wall(reader.epochs[0].began.at),
        )


def _share(reader: Reader) -> str:
    count = reader.seen.replicas
    return f"divides it over {count} replicas" if count > 1 else "does not divide it (1 replica)"


def _fix(reader: Reader, *, smaller: bool) -> str:
    """What to tell the sampler; `smaller`: not all ranks average their gradients together."""
    if reader.seen.sampler == "DistributedSampler":
        return FIX_SMALLER if smaller else FIX
    group = "group" if smaller else ""
    return (
        f"give {reader.seen.sampler} `dist.get_world_size({group})` as its number of replicas and "
        f"`dist.get_rank({group})` as its rank"
        + (", `group` being the one over which the gradients are averaged" if smaller else "")
    )


def _of_another(reader: Reader, averaging: int) -> str:
    """Which group of this rank the sampler's numbers are of, where that is a smaller one."""
    given = reader.seen.replicas, reader.seen.sampler_rank
    groups = (g.ranks for g in reader.rank.of(GroupReady) if g.member and len(g.ranks) > 1)
    mine = (r for r in groups if (len(r), sorted(r).index(reader.rank.rank)) == given)
    found = next((ranks for ranks in mine if len(ranks) < averaging), None)
    return (
        f"; what it was told are the numbers of the group of {ranks_text(found)}" if found else ""
    )


def _odd(fault: LoaderFault) -> Reader:
    return next((r for r in fault.readers if r.seen.sampler_rank != r.rank.rank), fault.readers[0])


def _places(fault: LoaderFault) -> str:
    taken = [r.seen.sampler_rank for r in fault.readers]
    return f"rank {taken[0]}" if len(set(taken)) == 1 else f"ranks {', '.join(map(str, taken[:8]))}"


def _beside(rank: Rank, averaging: set[int]) -> tuple[int, ...]:
    """A group of ranks of which one averages gradients with these: the model may be split there."""
    groups = (g.ranks for g in rank.of(GroupReady) if g.member and len(g.ranks) > 1)
    return next((ranks for ranks in groups if averaging & set(ranks) == {rank.rank}), ())


def _group(rank: Rank, averaging: set[int]) -> tuple[Related, ...]:
    """Where the group that averages gradients was made, or else the default one."""
    own = (g for g in rank.of(GroupReady) if g.member and set(g.ranks) == averaging and g.site >= 0)
    group = next(own, rank.default_group)
    spot = rank.location(group.site) if group else None
    return (Related(f"group of {len(group.ranks)} made here", spot),) if group and spot else ()
