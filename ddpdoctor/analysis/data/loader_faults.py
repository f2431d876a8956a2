"""What is wrong with how a loader's data is divided among the ranks: one verdict per loader.

Many of these faults look the same at first (several ranks read the same samples), so one place
decides between them: each loader gets one verdict, the first rule that fits, and the check that it
names reports it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...events import Payload
from ...run import Run, equal_ranks, odd_ones
from .content import (
    Agreement,
    agreement,
    any_column_differs,
    by_index,
    equal_positions,
    equal_sources,
    group_by_data,
    moved_samples,
    rows,
    same_pass,
    settings_differ,
)
from .epoch_audit import Audit, audits, by_chance, own_orders, pads, partitioned
from .fault import Difference, Doubt, LoaderFault, Overlap
from .forward_inputs import equal_batches, sharded_inputs
from .loaders import Loader, Reader, batch_size, loaders
from .parts import divided, leaking, overlapping
from .rng_state import equal_generators
from .sharing_ranks import groups_of, partners, sampler_fits
from .streams import (
    MATERIAL,
    all_workers_share,
    shared_between_workers,
    sharing_in_epoch,
    sharing_later,
    workers_share,
)

PLAIN = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
"""torch's samplers that know nothing of ranks."""

MOVED, FEWEST_MOVED = 0.2, 8
"""Share of the compared samples, and how many, that two ranks must have at different indices for
each to have selected its own from the same data."""


@lru_cache(maxsize=1)
def faults(run: Run) -> tuple[LoaderFault, ...]:
    """The verdicts on all loaders: at most one per loader and check."""
    found = [f for entry in audits(run) if (f := _indexed(run, *entry)) is not None]
    for loader in loaders(run):
        if loader.first.seen.iterable:
            found += [f for s in partners(run, loader) if (f := _stream(loader, s)) is not None]
            found += _workers(run, loader)
    return tuple(_merged(found))


def _merged(found: list[LoaderFault]) -> list[LoaderFault]:
    """The faults with those of one loader and check, in several sets of ranks, made one."""
    by_loader: dict[tuple[str, int], LoaderFault] = {}
    for fault in found:
        known = by_loader.setdefault((fault.check, id(fault.loader)), fault)
        if known is not fault:
            known.ranks = tuple(sorted({*known.ranks, *fault.ranks}))
            readers = (*known.readers, *fault.readers)
            known.readers = sorted(readers, key=lambda reader: reader.rank.rank)
            if known.parts and not fault.parts:
                known.overlap, known.parts = fault.overlap, ()
            elif known.parts:
                known.parts = (*known.parts, *fault.parts)
    return list(by_loader.values())


def of_check(run: Run, name: str) -> list[LoaderFault]:
    """The faults that the check of that name reports."""
    return [f for f in faults(run) if f.check == name]


def _indexed(
    run: Run, loader: Loader, ranks: frozenset[int], made: tuple[Audit, ...]
) -> LoaderFault | None:
    """The verdict on a loader with indices.

    The order matters. First come the cases in which equal indices do not mean equal samples, as no
    later rule would hold for them; then distributed samplers; then selections that each rank made;
    ranks that simply read the same come last.
    """
    readers = [r for r in loader.of(ranks) if any(e.indices for e in r.epochs)]
    differing = _payload_differences(readers)
    if (same := _equal_streams(run, loader, readers, made)) is not None:
        return same
    if all(r.seen.indexless for r in readers):
        return None  # the dataset ignores its indices, so they say nothing of its samples
    if all(r.seen.distributed for r in readers):
        return _with_samplers(run, loader, ranks, readers, made, differing)
    if differing and any(partitioned(a) for a in made):
        return _mismatch(loader, readers, made[0], differing)
    others = [other for other in loaders(run) if other is not loader]
    if differing and loader.trains and (leak := leaking(readers, made, others)) is not None:
        sharing = [r for r in readers if r.rank.rank in leak.held_out]
        fault = _mismatch(loader, sharing, leak.audits[0], differing)
        return replace(fault, beneath=leak.audits, held_out=leak.held_out)
    if loader.trains and (over := overlapping(readers, made)) is not None:
        return LoaderFault(
            "data-overlap",
            loader,
            over.ranks,
            [r for r in readers if r.rank.rank in over.ranks],
            max(over.audits, key=lambda a: len(a.shared)),
            "overlapping-selections",
            beneath=over.audits,
            selections=over.selected,
        )
    if not all(r.seen.payloads for r in readers) and _sibling_differs(run, loader, ranks):
        return None
    if made[0].same_order and sharded_inputs(run, readers):
        return None  # each rank takes its rows of the same batches
    if several := _ranks_by_dataset(readers):
        return _repeated_datasets(run, loader, several, made) if loader.trains else None
    return _unsharded(loader, readers, made, differing)


def _with_samplers(
    run: Run,
    loader: Loader,
    ranks: frozenset[int],
    readers: list[Reader],
    made: tuple[Audit, ...],
    differing: list[tuple[Payload, Payload]],
) -> LoaderFault | None:
    """The verdict where every rank has a distributed sampler."""
    everyone = tuple(r.rank.rank for r in readers)
    if not sampler_fits(run, ranks, readers):
        alone = all(r.seen.replicas == 1 for r in readers)
        if alone and (not loader.trains or _known_different(readers)):
            return None  # every rank evaluates everything, or reads all of its own part
        return LoaderFault("sampler-rank-mismatch", loader, everyone, readers, made[0])
    if (skewed := next((a for a in made if _skewed(a) and a.shared), None)) is not None:
        return LoaderFault("sampler-seed-skew", loader, everyone, readers, skewed)
    if differing:
        fault = _mismatch(loader, readers, made[0], differing)
        if (of := divided(readers)) and all(r.seen.sampler_length > 0 for r in readers):
            fault.sharded_twice = sum(r.seen.sampler_length for r in readers), of
        return fault
    worst = max(made, key=lambda a: len(a.shared))
    surplus = len(worst.shared) > _padding(readers) and not by_chance(worst)
    if not surplus or agreement(readers) not in (Agreement.SAME, Agreement.UNKNOWN):
        return None
    if loader.trains and 1 < readers[0].seen.replicas < len(ranks):
        return LoaderFault("sampler-rank-mismatch", loader, everyone, readers, worst)
    return _overlapping_shares(loader, readers, worst, made)


def _overlapping_shares(
    loader: Loader, readers: list[Reader], worst: Audit, made: tuple[Audit, ...]
) -> LoaderFault:
    """Shares that overlap, in an order that is the same on all ranks unless the overlap changes
    from epoch to epoch."""
    changing = _shared_by_epoch(made)
    rule: Overlap = "different-shuffles" if changing else "overlapping-shares"
    return LoaderFault(
        "data-overlap", loader, worst.sharing, readers, worst, rule, shared_by_epoch=changing
    )


def _equal_streams(
    run: Run, loader: Loader, readers: list[Reader], made: tuple[Audit, ...]
) -> LoaderFault | None:
    """Ranks that deliver the same samples at the same positions although their indices differ, or
    are ignored: random generators in the same state on all ranks choose the samples."""
    indexless, drawn = all(r.seen.indexless for r in readers), equal_generators(readers)
    disjoint = len(made[0].shared) <= max(0, _padding(readers))
    if not loader.trains or len(readers) < 2 or not (indexless or (disjoint and drawn)):
        return None
    ranks = frozenset(r.rank.rank for r in readers)
    samples, batches = equal_positions(readers), equal_batches(run, readers)
    if not (samples or batches) or sharded_inputs(run, readers):
        return None
    return LoaderFault(
        "data-overlap",
        loader,
        tuple(sorted(ranks)),
        readers,
        None,
        "equal-random-generators",
        None if any(r.seen.holds for r in readers) else Doubt.RANDOM_DATA,
        generators=drawn.names if drawn else (),
        equal_samples=samples,
        equal_batches=batches,
    )


def _ranks_by_dataset(readers: list[Reader]) -> list[list[Reader]]:
    """The ranks in groups that read the same data, where some ranks do and others read other data;
    empty otherwise."""
    groups = group_by_data(readers) if len(readers) > 2 else []
    if not 1 < len(groups) < len(readers):
        return []
    first, *others = (group[0] for group in groups)
    differ = all(
        _judged([first, o], _payload_differences([first, o])) is Agreement.DIFFERENT for o in others
    )
    return groups if differ else []


def _repeated_datasets(
    run: Run, loader: Loader, sets: list[list[Reader]], made: tuple[Audit, ...]
) -> LoaderFault | None:
    """Data that should be different on each rank, but is the same on some of them. Ranks with a
    process group of their own may share it on purpose."""
    found: list[LoaderFault] = []
    for readers in sets:
        ranks = frozenset(r.rank.rank for r in readers)
        own = tuple(a for audit in made if (a := audit.of(ranks)) is not None)
        intended = ranks in groups_of(readers[0].rank) or agreement(readers) is not Agreement.SAME
        if not own or intended:
            continue
        if own[0].same_order and sharded_inputs(run, readers):
            continue
        if (fault := _unsharded(loader, readers, own, [])) is not None and fault.doubt is None:
            found.append(replace(fault, check="data-overlap", overlap="repeated-parts"))
    if not found:
        return None
    parts = tuple(f.ranks for f in found)
    return replace(_merged(found)[0], parts=parts)


def _sibling_differs(run: Run, loader: Loader, ranks: frozenset[int]) -> bool:
    """Whether another loader that the same line made is known to read other samples on each rank:
    the samples of only some loaders are examined."""
    for other in loaders(run):
        if other is loader or other.first.made_at != loader.first.made_at:
            continue
        readers = other.of(ranks)
        if len(readers) < 2:
            continue
        if agreement(readers) is Agreement.DIFFERENT or _payload_differences(readers):
            return True
    return False


def _skewed(audit: Audit) -> bool:
    """Whether the ranks' samplers have different seeds or epoch numbers in the same epoch."""
    if len({e.began.step for e in audit.epochs.values()}) > 1:
        return False  # not the same epoch of the training
    known = [(e.began.seed, e.began.sampler_epoch) for e in audit.epochs.values()]
    if len(set(known)) == 1:
        return False
    seen = [e.seen for e in audit.epochs.values()]
    own = all(s.own_order and s.shuffle is None for s in seen) and not by_chance(audit)
    return own or any(s.shuffle for s in seen)


def _shared_by_epoch(made: tuple[Audit, ...]) -> list[int]:
    """How many samples several ranks read in each epoch, where that changes although the shares
    keep their sizes: the ranks then shuffle differently. Empty where it does not change, as where
    all ranks take wrong positions of one order."""
    whole = [a for a in made if a.complete]
    sizes = {tuple(e.samples for _, e in sorted(a.epochs.items())) for a in whole}
    counts = [len(a.shared) for a in whole]
    return counts[:8] if len(sizes) == 1 and len(set(counts)) > 1 else []


def _padding(readers: list[Reader]) -> int:
    """How many samples torch's sampler adds to make the shares equally long; one per rank where
    that is unknown."""
    seen = readers[0].seen
    return max(0, seen.total_size - seen.length) if seen.total_size > 0 else len(readers)


def _unsharded(
    loader: Loader,
    readers: list[Reader],
    made: tuple[Audit, ...],
    differing: list[tuple[Payload, Payload]],
) -> LoaderFault | None:
    """The verdict on ranks that read the same indices without a distributed sampler."""
    worst = max(made, key=lambda a: len(a.shared))
    whole = worst.same_sets or all(r.seen.sampler in PLAIN for r in readers)
    batch = batch_size(readers)
    exact = whole or own_orders(made)
    slack = 0 if exact else min(len(readers) * batch, len(worst.total) // 2)
    if len(worst.shared) <= slack or pads(worst, batch) or by_chance(worst):
        return None
    answer = _judged(readers, differing)
    if answer is Agreement.DIFFERENT:
        return None  # sharded manually: equal indices stand for other samples
    doubt = _doubt(answer, readers)
    # Samples that change each time they are read were not compared themselves.
    sources = equal_sources(readers) if answer is Agreement.RANDOM and doubt is None else []
    if whole:
        return LoaderFault(
            "sampler-missing", loader, worst.sharing, readers, worst, doubt=doubt, sources=sources
        )
    own = all(r.seen.own_order for r in readers)
    skewed = next((a for a in made if _skewed(a) and a.shared), None)
    if own and doubt is None and skewed is not None:
        return LoaderFault("sampler-seed-skew", loader, worst.sharing, readers, skewed)
    fault = _overlapping_shares(loader, readers, worst, made)
    return replace(fault, doubt=doubt, sources=sources)


def _judged(readers: list[Reader], differing: list[tuple[Payload, Payload]]) -> Agreement:
    """As `agreement`, but datasets that are made of other entries (`differing`) or have other
    settings on other ranks count, too, where samples alone do not decide."""
    answer = agreement(readers)
    if differing and (answer is Agreement.UNKNOWN or any_column_differs(readers)):
        return Agreement.DIFFERENT
    if answer is Agreement.RANDOM and settings_differ(readers):
        return Agreement.DIFFERENT
    return answer


def own_datasets(readers: list[Reader]) -> bool:
    """Whether each rank is known to read its own dataset, without a distributed sampler: equal
    indices then stand for other samples."""
    return not any(r.seen.distributed for r in readers) and _known_different(readers)


def _known_different(readers: list[Reader]) -> bool:
    """Whether equal indices are known to stand for other samples on each rank."""
    if len(readers) < 2:
        return False
    differing = _payload_differences(readers)
    if differing and all(m.content and m.content == t.content for m, t in differing):
        return False  # the same entries in another order
    answer = _judged(readers, differing)
    lengths = {r.seen.length for r in readers}
    return answer is Agreement.DIFFERENT or (len(lengths) > 1 and answer is not Agreement.SAME)


def _doubt(answer: Agreement, readers: list[Reader]) -> Doubt | None:
    """Why ranks with equal indices may still read different samples; None where they do not."""
    if answer is Agreement.SAME or (answer is Agreement.RANDOM and equal_sources(readers)):
        return None
    if answer is Agreement.RANDOM:
        return Doubt.RANDOM_SAMPLES
    listed = all(r.seen.payloads for r in readers)
    if any(e.content for r in readers for e in r.looked):
        if listed and not any(_constant(r) for r in readers):
            return None
        one = max((len(by_index(r)) for r in readers), default=0) < 2
        return Doubt.ONE_SAMPLE if one else Doubt.EQUAL_SAMPLES
    return None if listed else Doubt.UNREADABLE


def _constant(reader: Reader) -> bool:
    """Whether all examined samples of a rank are identical."""
    found = [row for e in reader.looked for _, row in rows(e)]
    return len(found) > 1 and len(set(found)) == 1


# --- different datasets on different ranks ------------------------------------------------------


def _payload_differences(readers: list[Reader]) -> list[tuple[Payload, Payload]]:
    """What differs in the ranks' datasets: a payload of the first rank, and that of another."""
    first, *others = readers
    found: dict[str, tuple[Payload, Payload]] = {}
    for other in others:
        mine = {p.name: p for p in first.seen.payloads}
        for theirs in other.seen.payloads:
            own = mine.get(theirs.name)
            if own is not None and (own.order, own.length) != (theirs.order, theirs.length):
                found.setdefault(own.name, (own, theirs))
    return list(found.values())


def _mismatch(
    loader: Loader,
    readers: list[Reader],
    audit: Audit,
    differing: list[tuple[Payload, Payload]],
) -> LoaderFault:
    """Ranks that share a dataset by index, but hold different ones."""
    mine, theirs = next((p for p in differing if _deliberate(*p)), differing[0])
    deliberate = _deliberate(mine, theirs)
    moved, of = (0, 0) if deliberate else _moved(readers)
    chosen = moved >= max(FEWEST_MOVED, MOVED * of)
    digests = {r.rank.rank: _digest_of(r, mine.name) for r in readers}
    difference = Difference(
        names=tuple(m.name for m, _ in differing),
        kind="choice" if chosen else mine.kind,
        reordered=bool(mine.content) and mine.content == theirs.content,
        digests=digests,
        moved=(moved, of) if chosen else (0, 0),
    )
    ranks = odd_ones(equal_ranks(digests)) or tuple(digests)
    return LoaderFault(
        "dataset-mismatch",
        loader,
        ranks,
        [r for r in readers if r.rank.rank in ranks],
        audit,
        doubt=None if deliberate or chosen else Doubt.OWN_TENSORS,
        difference=difference,
    )


def _moved(readers: list[Reader]) -> tuple[int, int]:
    """As `moved_samples`, for the first rank and the one that holds the most of its samples."""
    mine, *others = map(by_index, readers)
    return max((moved_samples(mine, theirs) for theirs in others), default=(0, 0))


def _deliberate(mine: Payload, theirs: Payload) -> bool:
    """Whether two payloads differ in selection or order, not just in random numbers that each rank
    drew."""
    reordered = bool(mine.content) and mine.content == theirs.content
    return mine.kind in ("indices", "choice", "text") or reordered or mine.length != theirs.length


def _digest_of(reader: Reader, name: str) -> str:
    found = next((p for p in reader.seen.payloads if p.name == name), None)
    return f"{found.order:08x} of {found.length}" if found else "none"


# --- streams without indices --------------------------------------------------------------------


def _stream(loader: Loader, ranks: frozenset[int]) -> LoaderFault | None:
    """Ranks that deliver the same samples of an iterable dataset, always or from one epoch on."""
    readers = loader.of(ranks)
    number, found = 0, sharing_in_epoch(readers, 0)
    if not found.ranks:
        number, found = sharing_later(readers)
    if not found.ranks:
        return None
    return LoaderFault(
        "data-overlap",
        loader,
        tuple(sorted(found.ranks)),
        [r for r in readers if r.rank.rank in found.ranks],
        None,
        "repeated-parts" if found.parts else "unsharded-stream",
        parts=found.parts,
        first_epoch=number,
        compared=found.best,
        workers_overlap=any(workers_share(r) for r in readers) or all_workers_share(readers),
    )


def _workers(run: Run, loader: Loader) -> list[LoaderFault]:
    """Workers of one rank that deliver the same samples, where no other rank delivers them."""
    found = [n for n, reader in loader.readers.items() if reader.read and workers_share(reader)]
    if not found and all_workers_share(list(loader.readers.values())):
        found = list(loader.readers)
    if not found or any(_stream(loader, s) for s in partners(run, loader)):
        return []
    readers = [loader.readers[n] for n in found]
    common, of = shared_between_workers(readers[0])
    if not of or common / of < MATERIAL:
        common, of = same_pass(readers[:1], workers=True)
    return [
        LoaderFault(
            "data-overlap",
            loader,
            tuple(found),
            readers,
            None,
            "unsharded-workers",
            compared=(common, of),
        )
    ]
