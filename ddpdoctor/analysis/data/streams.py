"""Which ranks, or workers of a rank, deliver the same samples of a stream, which has no indices."""

from __future__ import annotations

import itertools
from math import inf
from typing import NamedTuple

from ...events import FileRead
from ...run import Location
from .content import Row, distinct, numbers_of, overlap, rows, same_pass
from .fault import LoaderFault, PartlyShared
from .loaders import Epoch, Loader, Reader
from .rng_state import equal_generators
from .thresholds import (
    MANY,
    MATERIAL,
    NO_ACCIDENT,
    ONCE,
    OVERFITTED_BATCHES,
    OWN_SHUFFLES,
    WHOLE,
)

BY_ORDER = (
    "each rank takes its share of an order of its own",
    "bring the list into one order on all ranks before each takes its share: `sorted(...)`, or "
    "`Random(seed).shuffle(files)` without the rank in the seed, then `files[rank::world_size]`",
)
BY_HASH = (
    "`hash` of a text gives another number in each process, and so another share",
    "divide by a number that is the same on all ranks: `zlib.crc32(name.encode())` in place of "
    "`hash(name)`",
)
"""Why the lists of ranks overlap, and what to do."""


class Sharing(NamedTuple):
    """Which ranks deliver the same samples of a stream.

    Attributes:
        best: the most samples that two of these ranks both deliver, and of how many.
        parts: the sets of ranks that deliver the same samples; empty where all ranks do, or where
            some two ranks share only a part of theirs.
    """

    ranks: frozenset[int] = frozenset()
    best: tuple[int, int] = (0, 0)
    parts: tuple[tuple[int, ...], ...] = ()


def sharing_in_epoch(readers: list[Reader], number: int, share: float = MATERIAL) -> Sharing:
    """The ranks that deliver at least that share of another rank's samples in an epoch."""
    # One worker of each rank: what the workers of one rank share must not hide it.
    first = {r.rank.rank: _by_worker(r, number)[0] for r in readers}
    best, clear = (0, 0), True
    of_rank = {r: frozenset({r}) for r in first}
    for a, b in itertools.combinations(readers, 2):
        common, of = overlap(first[a.rank.rank], first[b.rank.rank])
        disjoint = of > 0 and not common
        if not of or common / of < share:
            common, of = same_pass([a, b], workers=False, since=number)
        if not of:
            common, of = equal_sequence(a.epochs[number], b.epochs[number])
        if of:
            one = of_rank[a.rank.rank] | of_rank[b.rank.rank]
            of_rank |= dict.fromkeys(one, one)
            best = max(best, (common, of))
        clear = clear and (common >= WHOLE * of if of else disjoint)
    sets = [tuple(sorted(s)) for s in dict.fromkeys(of_rank.values())]
    several = tuple(s for s in sets if len(s) > 1)
    ranks = frozenset(r for s in several for r in s)
    return Sharing(ranks, best, several if clear and len(sets) > 1 else ())


def sharing_later(readers: list[Reader]) -> tuple[int, Sharing]:
    """The epoch from which on ranks deliver mostly the same samples, in every examined epoch until
    the last, and which ranks; (0, no ranks) where there is none."""
    found = 0, Sharing()
    for number in range(min(len(r.epochs) for r in readers) - 1, 0, -1):
        epochs = [r.epochs[number] for r in readers]
        if not all(e.content and e.trained for e in epochs):
            continue
        sharing = sharing_in_epoch(readers, number, WHOLE)
        known = found[1].ranks
        at_once = len({e.began.step for e in epochs}) == 1
        if not sharing.ranks or not at_once or (known and known != sharing.ranks):
            break
        found = number, sharing
    return found


def workers_share(reader: Reader) -> tuple[int, int]:
    """How many samples the first two workers of a rank both deliver, and of how many; (0, 0) where
    that is no material part."""
    if reader.seen.workers < 2:
        return 0, 0
    first, second, *_ = _by_worker(reader)
    common, of = overlap(first, second)
    return (common, of) if of and common / of >= MATERIAL else (0, 0)


def repeated_order(old: Epoch, new: Epoch) -> bool | None:
    """Whether two epochs of a stream delivered the same samples in the same order, bit for bit;
    None where too few samples that can be told apart are on record."""
    before, now = rows(old), rows(new)
    count = min(len(before), len(now))
    different = {row for _, row in now[:count]}
    if len(different) < NO_ACCIDENT or not distinct([row for _, row in now[:count]]):
        return None
    return before[:count] == now[:count]


def equal_sequence(one: Epoch, other: Epoch) -> tuple[int, int]:
    """How many samples two ranks delivered, the same ones at each position, and of how many; (0, 0)
    where one of them differs. Samples may come several times, as they do where they are drawn with
    replacement: the same draws on two ranks are no accident."""
    mine, yours = rows(one), rows(other)
    count = min(len(mine), len(yours))
    equal = count > 0 and mine[:count] == yours[:count]
    enough = equal and len({row for _, row in mine[:count]}) >= NO_ACCIDENT
    return (count, count) if enough else (0, 0)


def examined_epochs(reader: Reader) -> list[Epoch]:
    """The training epochs of a stream of which samples are on record."""
    long = any(e.batches > OVERFITTED_BATCHES for e in reader.epochs)
    return [e for e in reader.epochs if long and e.content and e.trained]


def all_workers_share(readers: list[Reader]) -> bool:
    """Whether on every rank all workers deliver the same rows, each in its own order."""
    return all(r.seen.workers > 1 and same_pass([r], workers=True)[1] for r in readers)


def _by_worker(reader: Reader, number: int = 0) -> list[list[Row]]:
    """Digests of the samples that each worker delivered in an epoch; batches come from the workers
    in turn."""
    workers = max(1, reader.seen.workers)
    found: list[list[Row]] = [[] for _ in range(workers)]
    for batch, row in rows(reader.epochs[number]):
        found[batch % workers].append(row)
    return found


def stream_fault(loader: Loader, readers: list[Reader]) -> LoaderFault | None:
    """Ranks that deliver the same samples of an iterable dataset, always or from one epoch on."""
    number, found = 0, sharing_in_epoch(readers, 0)
    if not found.ranks:
        number, found = sharing_later(readers)
    partly = None
    if shuffles := _own_shuffles(readers):
        number, found = 0, Sharing(frozenset(r.rank.rank for r in readers), max(shuffles))
    elif not found.ranks and (partly := partly_shared(readers)):
        number = partly.epoch
        found = Sharing(frozenset(r.rank.rank for r in readers), (partly.common, partly.of))
    if not found.ranks:
        return overlapping_lists(loader, readers)
    if _by_chance(readers, number, found):
        return None
    common, of = found.best
    rule = "repeated-parts" if found.parts else "unsharded-stream"
    if _restored_alike([r for r in readers if r.rank.rank in found.ranks], number):
        rule = "restored-alike"
    if rule == "unsharded-stream" and _drawn(readers, number):
        rule = "equal-draws"
    drawn = equal_generators(readers) if rule == "unsharded-stream" else None
    if drawn is not None and drawn.names and not _comes_again(readers):
        rule = "equal-stream-draws"
    if shuffles:
        rule = "different-shuffles"
    if partly is not None and common < WHOLE * of:
        rule = "overlapping-streams"
    overlap = any(workers_share(r)[1] for r in readers) or all_workers_share(readers)
    return LoaderFault(
        "data-overlap",
        rule,
        loader,
        tuple(sorted(found.ranks)),
        [r for r in readers if r.rank.rank in found.ranks],
        parts=found.parts,
        first_epoch=number,
        compared=found.best,
        shared_by_epoch=[common for common, _ in shuffles],
        workers_overlap=overlap,
        generators=drawn,
        partly=partly,
        evidence={
            "samples compared": of,
            "delivered by several ranks": common,
            **(
                {"files read by several ranks": f"{partly.files} of {partly.read}"}
                if partly and partly.files
                else {}
            ),
            "workers of one rank overlap too": overlap,
        },
    )


def overlapping_lists(loader: Loader, readers: list[Reader]) -> LoaderFault | None:
    """Ranks whose data sets hold lists of files, or of other parts, that overlap: no rank has all
    that another has. What fills lists up to one length is no overlap."""
    lists: dict[str, list[set[int]]] = {}
    for reader in readers:
        for held in reader.seen.listed:
            lists.setdefault(held.name, []).append({*numbers_of(held.pieces)})
    for name, sets in lists.items():
        every = set().union(*sets)
        others = [set().union(*(s for s in sets if s is not mine)) for mine in sets]
        common = [(len(mine & rest), len(mine)) for mine, rest in zip(sets, others, strict=True)]
        enough = all(n > 1 and n >= MATERIAL * of for n, of in common)
        if len(sets) == len(readers) and enough and all(mine < every for mine in sets):
            several = sum(sum(entry in mine for mine in sets) > 1 for entry in every)
            sizes = {r.rank.rank: of for r, (_, of) in zip(readers, common, strict=True)}
            order, same = BY_HASH if _by_hash(readers[0]) else BY_ORDER
            return LoaderFault(
                "data-overlap",
                "overlapping-lists",
                loader,
                tuple(sorted(r.rank.rank for r in readers)),
                readers,
                facts={
                    "list": name,
                    "several": several,
                    "every": len(every),
                    "order": order,
                    "same": same,
                },
                evidence={"entries by rank": sizes},
            )
    return None


def orders_of_its_own(fault: LoaderFault) -> Location | None:
    """The only line that may give lists that overlap an order, or a share, of each process."""
    reader = fault.readers[0]
    places = reader.seen.per_process if fault.rule == "overlapping-lists" else ()
    return reader.rank.location(places[0].site) if len(places) == 1 else None


def _by_hash(reader: Reader) -> bool:
    """Whether only a `hash` may give the process a share of its own."""
    return {place.how for place in reader.seen.per_process} == {"hash"}


def partly_shared(readers: list[Reader]) -> PartlyShared | None:
    """Whether every rank delivers rows that others deliver, too, in every epoch on record; None
    where they divide the stream, or draw it with replacement."""
    first: PartlyShared | None = None
    for number in range(min(len(r.epochs) for r in readers)):
        epochs = [r.epochs[number] for r in readers]
        chosen = [e.chosen for e in epochs if e.chosen is not None and e.trained]
        if len(chosen) < len(readers):
            continue
        mask = (1 << max(c.halved for c in chosen)) - 1
        kept = [{row for row in numbers_of(c.rows) if not row & mask} for c in chosen]
        if min(map(len, kept)) < MANY or any(
            c.again > (1 - ONCE) * len(k) for c, k in zip(chosen, kept, strict=True)
        ):
            return None
        others = [set().union(*(k for k in kept if k is not mine)) for mine in kept]
        shares = [len(k & rest) / len(k) for k, rest in zip(kept, others, strict=True)]
        if min(shares) < MATERIAL:
            return None
        if first is None:
            files, read, line = _files_shared(readers, number)
            first = PartlyShared(number, len(kept[0] & others[0]), len(kept[0]), files, read, line)
    return first


def _files_shared(readers: list[Reader], number: int) -> tuple[int, int, Location | None]:
    """How many files several ranks read at one line in an epoch, and of how many; (0, 0) where all
    ranks read the same ones, or none in common."""
    by_line: dict[Location, list[set[str]]] = {}
    for reader in readers:
        epoch = reader.epochs[number]
        until = epoch.ended.at if epoch.ended else inf
        mine: dict[Location, set[str]] = {}
        for event in reader.rank.of(FileRead):
            spot = reader.rank.location(event.site)
            if spot is not None and epoch.began.at <= event.at <= until:
                mine.setdefault(spot, set()).add(event.path)
        for spot, paths in mine.items():
            by_line.setdefault(spot, []).append(paths)
    for spot, sets in by_line.items():
        every = set().union(*sets)
        common = [p for p in every if sum(p in s for s in sets) > 1]
        if len(sets) == len(readers) and common and all(s < every for s in sets):
            return len(common), len(every), spot
    return 0, 0, None


def _comes_again(readers: list[Reader]) -> bool:
    """Whether samples of the first epoch come again in the second one: they are read, not drawn."""
    epochs = [{row for _, row in rows(e)} for e in readers[0].epochs[:2]]
    return len(epochs) > 1 and not epochs[0].isdisjoint(epochs[1])


def _drawn(readers: list[Reader], number: int) -> bool:
    """Whether samples come again within an epoch in no order of their own: drawn with replacement,
    where sharding is no cure."""
    seen = [row for _, row in rows(readers[0].epochs[number])]
    return len(set(seen)) < ONCE * len(seen) and not readers[0].epochs[number].exhausted


def _by_chance(readers: list[Reader], number: int, found: Sharing) -> bool:
    """Whether ranks have only a part of their samples in common, and draw them with replacement:
    some come twice in an epoch of one rank."""
    common, of = found.best
    rows_of = ([row for _, row in rows(r.epochs[number])] for r in readers)
    again = any(len(set(mine)) < ONCE * len(mine) for mine in rows_of)
    return common < WHOLE * of and again


def _restored_alike(readers: list[Reader], number: int) -> bool:
    """Whether the loaders of these ranks were given the same state, over datasets that were other
    ones on each rank before."""
    began = [r.epochs[number].began for r in readers]
    states, held = {e.restored for e in began}, {e.restored_over for e in began}
    return len(states) == 1 and 0 not in states and len(held) == len(readers)


def _own_shuffles(readers: list[Reader]) -> list[tuple[int, int]]:
    """How many samples the first two ranks both delivered, and of how many, in each whole epoch,
    where each takes its share of an order of its own: no sample comes twice in a share, the shares
    together are as large as what all epochs hold, and the share of each changes, as does what two
    of them have in common.
    Empty where that is not seen."""
    count = min(len(r.epochs) for r in readers)
    epochs = [[{row for _, row in rows(r.epochs[n])} for r in readers] for n in range(count)]
    whole = [
        shares
        for n, shares in enumerate(epochs)
        if all(r.epochs[n].exhausted and r.epochs[n].trained for r in readers)
        and all(len(s) == len(rows(r.epochs[n])) for s, r in zip(shares, readers, strict=True))
    ]
    sizes = {len(share) for shares in whole for share in shares}
    if len(whole) < OWN_SHUFFLES or len(sizes) != 1 or min(sizes) < NO_ACCIDENT:
        return []
    every = set().union(*(share for shares in whole for share in shares))
    shared = [(len(shares[0] & shares[1]), len(shares[0])) for shares in whole]
    size = sizes.pop()
    some = sum(common for common, _ in shared) >= MATERIAL * size * len(shared)
    if len(every) != size * len(readers) or not some or len(set(shared)) < 2:
        return []
    change = all(len(set(map(frozenset, mine))) > 1 for mine in zip(*whole, strict=True))
    return shared if change else []


def worker_faults(loader: Loader) -> list[LoaderFault]:
    """Workers of one rank that deliver the same samples, where no other rank delivers them."""
    every = loader.readers.values()
    found = [r for r in every if r.read and workers_share(r)[1]]
    if not found and all_workers_share(list(every)):
        found = list(every)
    if not found:
        return []
    shared = workers_share(found[0])
    common, of = shared if shared[1] else same_pass(found[:1], workers=True)
    return [
        LoaderFault(
            "data-overlap",
            "unsharded-workers",
            loader,
            tuple(r.rank.rank for r in found),
            found,
            compared=(common, of),
            evidence={
                "workers": found[0].seen.workers,
                "delivered by several workers": f"{common} of {of} samples compared",
            },
        )
    ]
