"""Which ranks ought to divide a loader's data among them."""

from __future__ import annotations

from functools import cache
from math import inf

from ...events import ForwardInput, GroupReady, ShardedOver, StepDone, UnwrappedState, Wrapped
from ...run import Rank, Run, members
from .data_calls import only_reports_beyond, sums_over_all
from .loaders import Loader, Reader
from .split_layers import data_parallel, of_one_replica


def partners(run: Run, loader: Loader, *, begun: bool = False) -> list[frozenset[int]]:
    """Sets of ranks that ought to read different data: those that average gradients together.

    Empty where that is unknown: nothing is averaged, or parameters are sharded, or activations
    exchanged, in a way that may need equal inputs (tensor or sequence parallelism). Empty also
    where this loop averages nothing although others of the program do: each rank trains its own
    model there (a reference model).

    Args:
        begun: as in `Loader.of`.
    """
    readers = {reader.rank.rank for reader in loader.of(loader.readers, begun=begun)}
    if loader.trains and readers and all(trains_alone(loader.readers[r]) for r in readers):
        return []
    by_hand = {r: _group_by_hand(run.everyone[r]) for r in readers} if loader.trains else {}
    in_groups = bool(by_hand) and all(by_hand.values())
    if (
        loader.trains
        and not in_groups
        and any(_exchanges_activations(run.everyone[r]) for r in readers)
    ):
        return []
    on_mesh = data_parallel(run)
    wrapped = {r: s for r in readers if (s := _wrap_group(run.everyone[r]))}
    if on_mesh is not None:
        sets = set(on_mesh)
    elif wrapped:
        sets = set(wrapped.values())
    elif in_groups:
        sets = {ranks for ranks in by_hand.values() if ranks is not None}
    elif loader.trains and not all(_averages(loader.readers[r]) for r in readers):
        return []
    else:
        whole = {members(g) for r in readers if (g := run.everyone[r].default_group)}
        sets = {
            part for ranks in whole for part in of_one_replica(run, ranks & run.everyone.keys())
        }
    return [s for s in sorted(sets, key=sorted) if len(s & readers) > 1]


def _exchanges_activations(rank: Rank) -> bool:
    """Whether a model without a wrapper communicates inside of its backwards more than its own
    gradients."""
    if rank.first(Wrapped) is not None:
        return False
    states = [s for s in rank.of(UnwrappedState) if not s.last and s.step]
    return bool(states) and all(s.exchanged == "in backward" and not s.inside for s in states)


def _wrap_group(rank: Rank) -> frozenset[int] | None:
    """The largest group of ranks over which a wrapped or sharded model averages gradients."""
    groups = {g.group: g for g in rank.of(GroupReady)}
    found = []
    for wrapped in rank.of(Wrapped):
        if wrapped.wrapper == "DataParallel":
            continue
        group = groups.get(wrapped.group, groups.get(0) if wrapped.group < 0 else None)
        if group is not None and group.ranks:
            found.append(members(group))
    for sharded in rank.of(ShardedOver):
        # Groups smaller than its mesh may exist to share inputs.
        if all(len(g) >= len(sharded.ranks) for g in groups_of(rank)):
            found.append(frozenset(sharded.ranks))
    return max(found, key=len, default=None)


def _group_by_hand(rank: Rank) -> frozenset[int] | None:
    """The smaller group over which the program itself averaged all gradients in every step; None
    where it did not, or over all ranks."""
    states = [s for s in rank.of(UnwrappedState) if not s.last]
    numbers = {s.group for s in states[1:]}
    if len(numbers) != 1 or not all(s.complete for s in states[1:]):
        return None
    ranks = {g.group: members(g) for g in rank.of(GroupReady)}.get(numbers.pop())
    whole = rank.default_group
    return None if ranks is None or whole is None or ranks == members(whole) else ranks


def trains_alone(reader: Reader) -> bool:
    """Whether this loader's batches only train models that are neither wrapped nor synchronised
    manually: no other optimizer stepped in the loop over it, or the wrapped models got the batches
    of other loaders."""
    rank = reader.rank
    states = list(rank.of(UnwrappedState))
    exchanged = {e.optimizer for e in states if e.exchanged not in ("", "gathered")}
    alone = {e.optimizer for e in states} - exchanged
    if not alone:
        return False
    loops = [(e.began.at, e.ended.at if e.ended else inf) for e in reader.epochs]

    def within(at: float) -> bool:
        return any(began < at <= ended for began, ended in loops)

    stepped = {done.optimizer for done in rank.of(StepDone) if within(done.at)}
    if not stepped & alone:
        return False
    given = [set(e.loaders) for e in rank.of(ForwardInput) if within(e.at)]
    mine = {epoch.seen.loader for epoch in reader.epochs}
    elsewhere = bool(given) and all(loaders and not loaders & mine for loaders in given)
    return stepped <= alone or elsewhere


def _averages(reader: Reader) -> bool:
    """Whether the rank communicates in every training step of the loop although no model is
    wrapped."""
    ended = reader.training_ends
    return bool(ended) and all(
        not e.sharded and e.collectives >= max(1, e.backwards) for e in ended
    )


def sampler_fits(run: Run, ranks: frozenset[int], readers: list[Reader]) -> bool:
    """Whether the samplers' `num_replicas` and `rank` divide the data over these ranks, or over
    groups that the program made for it."""
    replicas = {r.seen.replicas for r in readers}
    if len(replicas) != 1:
        return False
    (size,) = replicas
    place = {r.rank.rank: r.seen.sampler_rank for r in readers}
    # Groups that exchange nothing need no common sharding of the data.
    independent = all(e.ended.collectives == 0 for r in readers for e in r.epochs if e.ended) or (
        all(r.trains and only_reports_beyond(r.rank, ranks) for r in readers)
    )
    limit = len(ranks) if independent else size
    on_mesh = set(data_parallel(run) or ())

    @cache
    def divides(group: frozenset[int]) -> bool:
        return len(group) <= limit and _divides(group, place, size)

    @cache
    def repeats(group: frozenset[int]) -> bool:
        return group <= ranks and _repeats(group, place, size, len(ranks))

    return all(
        any(map(divides, (ranks, *groups_of(reader.rank))))
        or any(
            repeats(group)
            for group in groups_of(reader.rank)
            if size > 1 or group not in _averaging(reader.rank) | on_mesh
        )
        for reader in readers
    )


def divisions(run: Run, loader: Loader) -> list[frozenset[int]]:
    """Sets of ranks among which a loader's data is to be divided: those of `partners`, or smaller
    ones over which the sampler divides it on purpose. In the latter case ranks of a tensor-parallel
    group or the stages of a pipeline read the same samples, each in another of the sets."""
    found: dict[frozenset[int], None] = {}
    for ranks in partners(run, loader):
        found.update(dict.fromkeys(_divided(loader.of(ranks)) or [ranks]))
    return list(found)


def _divided(readers: list[Reader]) -> list[frozenset[int]]:
    """The smaller sets of ranks over which samplers divide the data; empty where there are none."""
    place = {r.rank.rank: r.seen.sampler_rank for r in readers}
    sizes = {r.seen.replicas if r.seen.distributed else -1 for r in readers}
    size = max(sizes)
    if len(sizes) > 1 or not 1 < size < len(readers) == size * (len(readers) // size):
        return []
    of = {r.rank.rank: groups_of(r.rank) for r in readers}
    if all(any(_repeats(g, place, size, len(place)) for g in of[r]) for r in place):
        by_place = [[r for r in sorted(place) if place[r] == n] for n in range(size)]
        return [frozenset(ranks) for ranks in zip(*by_place, strict=False)]
    if any(_wrap_group(r.rank) or sums_over_all(r.rank) for r in readers):
        return []
    found = {g for groups in of.values() for g in groups if _divides(g, place, size)}
    disjoint = sum(map(len, found)) == len(place) and set().union(*found) == place.keys()
    return sorted(found, key=sorted) if disjoint else []


def groups_of(rank: Rank) -> list[frozenset[int]]:
    """Process groups of the rank that may divide or share data. The groups of a mesh that one model
    is sharded and replicated over (HSDP) do neither, and are left out."""
    every = [members(g) for g in rank.of(GroupReady) if g.member and len(g.ranks) > 1]
    for sharded in rank.of(ShardedOver):
        for group in map(frozenset, sharded.groups):
            # A second group of the same ranks may be for data (sequence parallelism).
            if every.count(group) == 1:
                every.remove(group)
    return every


def _averaging(rank: Rank) -> set[frozenset[int]]:
    """Groups over which a wrapped model averages gradients. Their ranks ought to read different
    data."""
    wrapped = {e.group for e in rank.of(Wrapped)}
    return {members(g) for g in rank.of(GroupReady) if g.group in wrapped}


def _divides(group: frozenset[int], place: dict[int, int], size: int) -> bool:
    """Whether the samplers of a group have distinct ranks (`place`, by rank) below `size`."""
    taken = [place[r] for r in group if r in place]
    return len(group) == size and len(set(taken)) == len(taken) and max(taken, default=size) < size


def _repeats(group: frozenset[int], place: dict[int, int], size: int, world: int) -> bool:
    """Whether all samplers of a group have the same rank, so that its ranks share their data on
    purpose (tensor or sequence parallelism)."""
    taken = {place[r] for r in group if r in place}
    return len(group) * size == world and len(taken) == 1
