"""What is wrong with the way a loader's data is divided, one verdict for all checks of the family.

The faults look alike from afar (ranks read the same samples), so they are told apart in one place:
each loader gets one verdict, the first that fits, and the check of that name reports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from ...events import Payload
from ...run import Run, equal_ranks, groups_text, odd_ones
from .content import (
    by_index,
    elsewhere,
    held_alike,
    parts_differ,
    read_alike,
    reported_apart,
    rows,
    same_pass,
    same_places,
    verdict,
)
from .epoch_audit import Audit, audits, by_chance, own_orders, pads, partitioned
from .forward_inputs import fed_alike, in_parts
from .loaders import Loader, Reader, batch_size, loaders
from .parts import divided, leaking, overlapping
from .rng_state import in_step
from .sharing_ranks import groups_of, partners, sampler_fits
from .streams import MATERIAL, all_share, between_workers, later, shares, together

PLAIN = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")

MOVING = "read by several ranks, by epoch"
"""Name of the evidence that the ranks do not take their shares of one order."""

AGAIN = "workers deliver them again"
"""Name of the evidence whether the workers of one rank do not divide a stream either."""

HELD = "samples are made of"
"""Name of the evidence that they are the same, although each is another whenever it is read."""

STREAM = "random generators in step"
"""Name of the evidence that samples are chosen by generators that stand alike."""

HELD_OUT = "held out, and trained on by another rank"
"""Name of the evidence how many samples each rank keeps for a test of what others train on."""

TWICE = "samples read in an epoch"
"""Name of the evidence how few they are where two things divide the data."""

SELECTED = "selected by each rank"
"""Name of the evidence which parts of one data set the ranks select."""

FROM_EPOCH = "from epoch"
"""Name of the evidence that a stream was divided before."""

ELSEWHERE, FEWEST_ELSEWHERE = 0.2, 8
"""Share of the samples compared, and how many, that two ranks have at different indices where each
chose its own from the same ones."""


@dataclass(eq=False)
class LoaderFault:
    """One loader whose data is divided wrongly.

    Attributes:
        check: name of the check that reports it.
        doubt: why it may be meant, empty where it is proven.
        evidence: figures beyond those of the audit.
        parts: the sets of ranks that deliver the same samples, where others do not.
        beneath: audits of the data set that the ranks select their parts from.
    """

    check: str
    loader: Loader
    ranks: tuple[int, ...]
    readers: list[Reader]
    audit: Audit | None = None
    doubt: str = ""
    evidence: dict[str, object] = field(default_factory=dict)
    parts: tuple[tuple[int, ...], ...] = ()
    beneath: tuple[Audit, ...] = ()


@lru_cache(maxsize=1)
def faults(run: Run) -> tuple[LoaderFault, ...]:
    """At most one per loader and set of ranks."""
    found = [f for entry in audits(run) if (f := _indexed(run, *entry)) is not None]
    for loader in loaders(run):
        if loader.first.seen.iterable:
            found += [f for s in partners(run, loader) if (f := _stream(loader, s)) is not None]
            found += _workers(run, loader)
    return tuple(_merged(found))


def _merged(found: list[LoaderFault]) -> list[LoaderFault]:
    """The same fault in several sets of ranks is one."""
    by_loader: dict[tuple[str, int], LoaderFault] = {}
    for fault in found:
        known = by_loader.setdefault((fault.check, id(fault.loader)), fault)
        if known is not fault:
            known.ranks = tuple(sorted({*known.ranks, *fault.ranks}))
            readers = (*known.readers, *fault.readers)
            known.readers = sorted(readers, key=lambda reader: reader.rank.rank)
            both = known.parts and fault.parts
            known.parts = (*known.parts, *fault.parts) if both else ()
    return list(by_loader.values())


def of_check(run: Run, name: str) -> list[LoaderFault]:
    return [f for f in faults(run) if f.check == name]


def _indexed(
    run: Run, loader: Loader, ranks: frozenset[int], made: tuple[Audit, ...]
) -> LoaderFault | None:
    readers = [r for r in loader.of(ranks) if any(e.indices for e in r.epochs)]
    everyone = tuple(r.rank.rank for r in readers)
    differing = _differing(readers)
    if (same := _same_stream(run, loader, readers, made)) is not None:
        return same
    if all(r.seen.indexless for r in readers):
        return None  # which samples they are is not for indices to say
    if all(r.seen.distributed for r in readers):
        if not sampler_fits(run, ranks, readers):
            alone = all(r.seen.replicas == 1 for r in readers)
            if alone and (not loader.trains or _apart(readers)):
                return None  # every rank evaluates everything, or reads all of its own part
            return LoaderFault("sampler-rank-mismatch", loader, everyone, readers, made[0])
        if (skewed := next((a for a in made if _skewed(a) and a.shared), None)) is not None:
            return LoaderFault("sampler-seed-skew", loader, everyone, readers, skewed)
        if differing:
            fault = _mismatch(loader, readers, made[0], differing)
            if (of := divided(readers)) and all(r.seen.sampler_length > 0 for r in readers):
                read = sum(r.seen.sampler_length for r in readers)
                fault.evidence[TWICE] = f"{read} of {of}"
            return fault
        worst = max(made, key=lambda a: len(a.shared))
        surplus = len(worst.shared) > _padding(readers) and not by_chance(worst)
        if surplus and verdict(readers) in ("same", "unknown"):
            if loader.trains and 1 < readers[0].seen.replicas < len(ranks):
                return LoaderFault("sampler-rank-mismatch", loader, everyone, readers, worst)
            moving = _moving(made)
            return LoaderFault(
                "data-overlap", loader, worst.sharing, readers, worst, evidence=moving
            )
        return None
    if differing and any(partitioned(a) for a in made):
        return _mismatch(loader, readers, made[0], differing)
    others = [other for other in loaders(run) if other is not loader]
    if differing and loader.trains and (leak := leaking(readers, made, others)) is not None:
        sharing = [r for r in readers if r.rank.rank in leak.held]
        fault = _mismatch(loader, sharing, leak.audits[0], differing)
        fault.evidence[HELD_OUT] = {r: f"{n} of {of}" for r, (n, of) in leak.held.items()}
        return replace(fault, beneath=leak.audits)
    if loader.trains and (over := overlapping(readers, made)) is not None:
        worst = max(over.audits, key=lambda a: len(a.shared))
        reported: dict[str, object] = {SELECTED: over.reported}
        sharing = [r for r in readers if r.rank.rank in over.ranks]
        return LoaderFault(
            "data-overlap", loader, over.ranks, sharing, worst, "", reported, (), over.audits
        )
    if not all(r.seen.payloads for r in readers) and _others_differ(run, loader, ranks):
        return None
    if made[0].same_order and in_parts(run, ranks, batch_size(readers)):
        return None  # each takes its rows of the same batches
    if several := _sets_of_data(readers):
        return _repeated_sets(run, loader, several, made) if loader.trains else None
    return _unsharded(loader, readers, made, differing)


def _same_stream(
    run: Run, loader: Loader, readers: list[Reader], made: tuple[Audit, ...]
) -> LoaderFault | None:
    """Ranks that deliver the same samples at the same places, although their indices are others, or
    none is looked at: each is chosen by a random generator that stands alike on all ranks."""
    indexless, drawn = all(r.seen.indexless for r in readers), in_step(readers)
    apart = len(made[0].shared) <= max(0, _padding(readers))
    if not loader.trains or len(readers) < 2 or not (indexless or (apart and drawn)):
        return None
    ranks = frozenset(r.rank.rank for r in readers)
    samples, batches = same_places(readers), fed_alike(run, ranks)
    if not (samples or batches) or in_parts(run, ranks, batch_size(readers)):
        return None
    evidence: dict[str, object] = {
        STREAM: list(drawn.names) if drawn else "of the data set's own",
        "looks at the index": not indexless,
        "the same samples at the same places": samples,
        "the same batches given to the model": batches,
    }
    holds = any(r.seen.holds for r in readers)
    doubt = "" if holds else "random numbers, it seems, made on the spot"
    return LoaderFault("data-overlap", loader, tuple(sorted(ranks)), readers, None, doubt, evidence)


def _sets_of_data(readers: list[Reader]) -> list[list[Reader]]:
    """The ranks by the data that they read, where that is not the same on all ranks, but on some;
    empty otherwise."""
    groups = read_alike(readers) if len(readers) > 2 else []
    if not 1 < len(groups) < len(readers):
        return []
    first, *others = (group[0] for group in groups)
    apart = all(_judged([first, o], _differing([first, o])) == "differ" for o in others)
    return groups if apart else []


def _repeated_sets(
    run: Run, loader: Loader, sets: list[list[Reader]], made: tuple[Audit, ...]
) -> LoaderFault | None:
    """Data that is meant to be another one on each rank, and is the same on some of them. Those
    that make a process group may share it on purpose."""
    found: list[LoaderFault] = []
    for readers in sets:
        ranks = frozenset(r.rank.rank for r in readers)
        own = tuple(a for audit in made if (a := audit.of(ranks)) is not None)
        shared = ranks in groups_of(readers[0].rank) or verdict(readers) != "same"
        if not own or shared or (own[0].same_order and in_parts(run, ranks, batch_size(readers))):
            continue
        if (fault := _unsharded(loader, readers, own, [])) is not None and not fault.doubt:
            found.append(replace(fault, check="data-overlap"))
    if not found:
        return None
    parts = tuple(f.ranks for f in found)
    return replace(_merged(found)[0], parts=parts)


def _others_differ(run: Run, loader: Loader, ranks: frozenset[int]) -> bool:
    """Not every loader's samples are looked at: whether those of another one that the same line
    made and that were are other samples on each rank."""
    for other in loaders(run):
        if other is loader or other.first.made_at != loader.first.made_at:
            continue
        readers = other.of(ranks)
        if len(readers) > 1 and (verdict(readers) == "differ" or _differing(readers)):
            return True
    return False


def _skewed(audit: Audit) -> bool:
    """Ranks shuffle with different seeds, or are in different epochs."""
    if len({e.began.step for e in audit.epochs.values()}) > 1:
        return False  # not the same epoch of the training
    known = [(e.began.seed, e.began.sampler_epoch) for e in audit.epochs.values()]
    if len(set(known)) == 1:
        return False
    seen = [e.seen for e in audit.epochs.values()]
    own = all(s.own_order and s.shuffle is None for s in seen) and not by_chance(audit)
    return own or any(s.shuffle for s in seen)


def _moving(made: tuple[Audit, ...]) -> dict[str, object]:
    """How much the ranks' shares overlapped in each epoch, where that changes although the shares
    are as large as before. It does not where all take wrong places of one order."""
    whole = [a for a in made if a.complete]
    sizes = {tuple(e.samples for _, e in sorted(a.epochs.items())) for a in whole}
    counts = [len(a.shared) for a in whole]
    return {MOVING: counts[:8]} if len(sizes) == 1 and len(set(counts)) > 1 else {}


def _padding(readers: list[Reader]) -> int:
    seen = readers[0].seen
    return max(0, seen.total_size - seen.length) if seen.total_size > 0 else len(readers)


def _unsharded(
    loader: Loader,
    readers: list[Reader],
    made: tuple[Audit, ...],
    differing: list[tuple[Payload, Payload]],
) -> LoaderFault | None:
    worst = max(made, key=lambda a: len(a.shared))
    whole = worst.same_sets or all(r.seen.sampler in PLAIN for r in readers)
    batch = batch_size(readers)
    exact = whole or own_orders(made)
    slack = 0 if exact else min(len(readers) * batch, len(worst.total) // 2)
    if len(worst.shared) <= slack or pads(worst, batch) or by_chance(worst):
        return None
    answer = _judged(readers, differing)
    if answer == "differ":
        return None  # sharded by hand: the same numbers stand for other data
    doubt = _doubt(answer, readers)
    held: dict[str, object] = {}
    if answer == "random" and not doubt:
        held = {HELD: f"{', '.join(held_alike(readers))}, the same on these ranks"}
    if whole:
        return LoaderFault("sampler-missing", loader, worst.sharing, readers, worst, doubt, held)
    own = all(r.seen.own_order for r in readers)
    skewed = next((a for a in made if _skewed(a) and a.shared), None)
    if own and not doubt and skewed is not None:
        return LoaderFault("sampler-seed-skew", loader, worst.sharing, readers, skewed)
    moving = _moving(made)
    evidence = {**moving, **held}
    return LoaderFault("data-overlap", loader, worst.sharing, readers, worst, doubt, evidence)


def _judged(readers: list[Reader], differing: list[tuple[Payload, Payload]]) -> str:
    """As `verdict`, with what the data sets index, too."""
    answer = verdict(readers)
    if differing and (answer == "unknown" or parts_differ(readers)):
        return "differ"
    return "differ" if answer == "random" and reported_apart(readers) else answer


def own_data(readers: list[Reader]) -> bool:
    """Whether each rank is known to read a data set of its own, without a sampler that divides one:
    the same index then stands for other samples."""
    return not any(r.seen.distributed for r in readers) and _apart(readers)


def _apart(readers: list[Reader]) -> bool:
    """Whether the same index is known to stand for other samples on each rank."""
    if len(readers) < 2:
        return False
    differing = _differing(readers)
    if differing and all(m.content and m.content == t.content for m, t in differing):
        return False  # the same entries in another order
    answer = _judged(readers, differing)
    unlike = len({r.seen.length for r in readers}) > 1
    return answer == "differ" or (unlike and answer != "same")


def _doubt(answer: str, readers: list[Reader]) -> str:
    if answer == "same" or (answer == "random" and held_alike(readers)):
        return ""
    if answer == "random":
        return "what a sample contains changes each time it is read"
    if any(e.content for r in readers for e in r.looked):
        alike = all(r.seen.payloads and not _constant(r) for r in readers)
        single = max((len(by_index(r)) for r in readers), default=0) < 2
        few = "a single sample tells little" if single else ""
        return "" if alike else few or "all samples that were looked at are alike"
    return "" if all(r.seen.payloads for r in readers) else "the samples could not be looked at"


def _constant(reader: Reader) -> bool:
    found = [row for e in reader.looked for _, row in rows(e)]
    return len(found) > 1 and len(set(found)) == 1


# --- different data sets on different ranks -----------------------------------------------------


def _differing(readers: list[Reader]) -> list[tuple[Payload, Payload]]:
    """Payloads of the first rank beside one that another rank has instead."""
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
    mine, theirs = next((p for p in differing if _deliberate(*p)), differing[0])
    deliberate = _deliberate(mine, theirs)
    moved, of = (0, 0) if deliberate else _elsewhere(readers)
    chosen = moved >= max(FEWEST_ELSEWHERE, ELSEWHERE * of)
    doubt = "" if deliberate or chosen else "each rank holds tensors of its own"
    reordered = bool(mine.content) and mine.content == theirs.content
    names = [m.name for m, _ in differing]
    digests = {r.rank.rank: _digest_of(r, mine.name) for r in readers}
    groups = equal_ranks(digests)
    evidence: dict[str, object] = {
        "differs": names,
        "same entries in another order": reordered,
        "digests": digests,
        "groups of equal ranks": groups_text(groups),
        "kind": "choice" if chosen else mine.kind,
        **({"the same samples at other indices": f"{moved} of {of}"} if chosen else {}),
    }
    ranks = odd_ones(groups) or tuple(digests)
    readers = [r for r in readers if r.rank.rank in ranks]
    return LoaderFault("dataset-mismatch", loader, ranks, readers, audit, doubt, evidence)


def _elsewhere(readers: list[Reader]) -> tuple[int, int]:
    """As `elsewhere`, of the first rank and the one that holds the most of its samples."""
    mine, *others = map(by_index, readers)
    return max((elsewhere(mine, theirs) for theirs in others), default=(0, 0))


def _deliberate(mine: Payload, theirs: Payload) -> bool:
    """The difference is one of selection or order, not just of random numbers made per rank."""
    reordered = bool(mine.content) and mine.content == theirs.content
    return mine.kind in ("indices", "choice", "text") or reordered or mine.length != theirs.length


def _digest_of(reader: Reader, name: str) -> str:
    found = next((p for p in reader.seen.payloads if p.name == name), None)
    return f"{found.order:08x} of {found.length}" if found else "none"


# --- streams without indices --------------------------------------------------------------------


def _stream(loader: Loader, ranks: frozenset[int]) -> LoaderFault | None:
    """Ranks that deliver the same samples of an iterable data set, always or from one epoch on."""
    readers = loader.of(ranks)
    number, found = 0, together(readers, 0)
    if not found.ranks:
        number, found = later(readers)
    if not found.ranks:
        return None
    evidence: dict[str, object] = {
        "samples compared": found.best[1],
        "delivered by several ranks": found.best[0],
        AGAIN: any(shares(r) for r in readers) or all_share(readers),
        "batches": {r.rank.rank: r.epochs[number].batches for r in readers},
        **({FROM_EPOCH: number} if number else {}),
    }
    members = [r for r in readers if r.rank.rank in found.ranks]
    who = tuple(sorted(found.ranks))
    return LoaderFault("data-overlap", loader, who, members, None, "", evidence, found.parts)


def _workers(run: Run, loader: Loader) -> list[LoaderFault]:
    """Workers of one rank that deliver the same samples, where no other rank is involved."""
    found = []
    for number, reader in loader.readers.items():
        if reader.read and shares(reader):
            found.append(number)
    found = found or (list(loader.readers) if all_share(list(loader.readers.values())) else [])
    if not found or any(_stream(loader, s) for s in partners(run, loader)):
        return []
    readers = [loader.readers[n] for n in found]
    common, of = between_workers(readers[0])
    if not of or common / of < MATERIAL:
        common, of = same_pass(readers[:1], workers=True)
    evidence: dict[str, object] = {
        "workers": readers[0].seen.workers,
        "between": "workers",
        "delivered by several workers": f"{common} of {of} samples compared",
        "batches": {r.rank.rank: r.epochs[0].batches for r in readers},
    }
    return [LoaderFault("data-overlap", loader, tuple(found), readers, None, "", evidence)]
