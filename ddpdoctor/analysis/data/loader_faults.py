"""What is wrong with how a loader's data is divided among the ranks: one verdict per loader.

Many of these faults look the same at first (several ranks read the same samples), so one list of
rules decides between them: the first that answers gives the verdict, and its name stands in the
finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ...run import Run
from .content import Agreement, agreement, any_column_differs, equal_positions
from .datasets import (
    difference,
    differences,
    doubt,
    equal_sources,
    group_by_data,
    judged,
    known_different,
)
from .division import Division, divided_loaders
from .epoch_audit import Audit, by_chance, independent, own_orders, pads, partitioned
from .fault import Doubt, Intended, LoaderFault
from .forward_inputs import equal_batches, unequal_batches
from .loaders import Reader, loaders
from .parts import divided, leaking, overlapping
from .rng_state import equal_generators
from .sharing_ranks import groups_of, partners, sampler_fits
from .split_layers import split_layers
from .streams import overlapping_lists, stream_fault, worker_faults
from .thresholds import FEWEST_SHARED

PLAIN = ("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
"""torch's samplers that know nothing of ranks."""

Rule = Callable[[Division], LoaderFault | Intended | None]
"""A fault, a reason why there is none, or None where the rule does not apply."""


@lru_cache(maxsize=1)
def faults(run: Run) -> tuple[LoaderFault, ...]:
    """The verdicts on all loaders: at most one per loader and check."""
    found = list(split_layers(run))
    apart = {id(f.loader) for f in found}  # what else is wrong there follows from it
    divisions = [d for d in divided_loaders(run) if id(d.loader) not in apart]
    found += [f for d in divisions if (f := _verdict(d, _rules(d))) is not None]
    for loader in loaders(run):
        if loader.first.seen.iterable:
            sets = partners(run, loader)
            shared = [f for s in sets if (f := stream_fault(loader, loader.of(s))) is not None]
            found += shared or worker_faults(loader)
    return tuple(_merged(found))


def sound_divisions(run: Run) -> list[Division]:
    """What ranks read of the loaders without a fault."""
    faulty = {id(f.loader) for f in faults(run)}
    return [d for d in divided_loaders(run) if id(d.loader) not in faulty]


def of_check(run: Run, name: str) -> list[LoaderFault]:
    """The faults that the check of that name reports."""
    return [f for f in faults(run) if f.check == name]


def _verdict(division: Division, rules: Sequence[Rule]) -> LoaderFault | None:
    answer = next((a for rule in rules if (a := rule(division)) is not None), None)
    return answer if isinstance(answer, LoaderFault) else None


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
                known.rule, known.parts = fault.rule, ()
            elif known.parts:
                known.parts = (*known.parts, *fault.parts)
    return list(by_loader.values())


def _fault(
    division: Division,
    check: str,
    rule: str,
    audit: Audit | None,
    ranks: Sequence[int] = (),
    **more: object,
) -> LoaderFault:
    """A fault of these ranks, or of all that read the loader."""
    everyone = tuple(ranks) or division.numbers
    return LoaderFault(check, rule, division.loader, everyone, division.readers, audit, **more)  # type: ignore[arg-type]


# --- where equal indices do not mean equal samples: no later rule would hold ----------------------


def _equal_generators(d: Division) -> LoaderFault | None:
    """Ranks that deliver the same samples at the same positions although their indices differ, or
    are ignored: random generators in the same state on all ranks choose the samples."""
    indexless, drawn = all(r.seen.indexless for r in d.readers), equal_generators(d.readers)
    disjoint = len(d.audits[0].shared) <= max(0, d.padding)
    if not d.loader.trains or len(d.readers) < 2 or not (indexless or (disjoint and drawn)):
        return None
    samples, batches = equal_positions(d.readers), equal_batches(d.run, d.readers)
    if not (samples or batches) or d.takes_rows:
        return None
    return _fault(
        d,
        "data-overlap",
        "equal-random-generators",
        None,
        doubt=None if any(r.seen.holds for r in d.readers) else Doubt.RANDOM_DATA,
        generators=drawn,
        evidence={
            "generators in the same state": list(drawn.names if drawn else ())
            or "the dataset's own",
            "the dataset uses the index": not d.readers[0].seen.indexless,
            "equal samples at equal positions": samples,
            "equal batches given to the model": batches,
        },
    )


def _indices_ignored(d: Division) -> Intended | None:
    return Intended.INDICES_IGNORED if all(r.seen.indexless for r in d.readers) else None


# --- distributed samplers on all ranks -----------------------------------------------------------


def _wrong_group(d: Division) -> LoaderFault | Intended | None:
    """Samplers that do not divide the data over the ranks that average gradients."""
    if sampler_fits(d.run, d.ranks, d.readers):
        return None
    alone = all(r.seen.replicas == 1 for r in d.readers)
    if alone and (not d.loader.trains or known_different(d.readers)):
        return Intended.READ_ALONE
    return _fault(d, "sampler-rank-mismatch", "wrong-group", d.audits[0])


def _different_seeds(d: Division) -> LoaderFault | None:
    audit = d.skewed
    if audit is None:
        return None
    return _fault(d, "sampler-seed-skew", _skew(audit), audit)


def _skew(audit: Audit) -> str:
    if len({e.began.seed for e in audit.epochs.values()}) > 1:
        return "different-seeds"
    set_by_all = all(e.began.epochs_set for e in audit.epochs.values())
    return "different-epochs" if set_by_all else "set-epoch-on-some-ranks"


def each_set_divides_its_own(d: Division) -> bool:
    """Whether the ranks with equal datasets share each of them out among themselves, as where
    several tasks are trained at once."""
    held: dict[tuple[int, ...], list[Reader]] = {}
    for reader in d.readers:
        held.setdefault(tuple(p.order for p in reader.seen.payloads), []).append(reader)
    return len(held) > 1 and all(
        len(mine) > 1
        and sorted(r.seen.sampler_rank for r in mine) == [*range(len(mine))]
        and all(r.seen.replicas == len(mine) for r in mine)
        for mine in held.values()
    )


def _different_datasets(d: Division) -> LoaderFault | Intended | None:
    if not d.differing:
        return None
    if each_set_divides_its_own(d):
        return Intended.DIVIDED
    if agreement(d.readers) is Agreement.SAME and not any_column_differs(d.readers):
        return None  # the samples are not made of what differs
    fault = _mismatch(d, d.readers, d.audits[0])
    if (of := divided(d.readers)) and all(r.seen.sampler_length > 0 for r in d.readers):
        read = sum(r.seen.sampler_length for r in d.readers)
        fault.rule, fault.facts = "sharded-twice", {"read": read, "of": of}
        fault.evidence |= {"samples read in an epoch": f"{read} of {of}"}
    return fault


def _no_surplus(d: Division) -> Intended | None:
    """Whether the ranks share no more samples than padding and random draws explain, or know them
    to be other samples."""
    surplus = len(d.worst.shared) > d.padding and not by_chance(d.worst)
    same = surplus and agreement(d.readers) in (Agreement.SAME, Agreement.UNKNOWN)
    return None if same else Intended.DIVIDED


def _smaller_group(d: Division) -> LoaderFault | None:
    """Samplers that divide the data over a part of the ranks, which therefore repeats."""
    if not (d.loader.trains and 1 < d.readers[0].seen.replicas < len(d.ranks)):
        return None
    return _fault(d, "sampler-rank-mismatch", "wrong-group", d.worst)


UNDIVIDED = 2 / 3
"""Where each rank reads as much of the data set, its sampler does not divide it."""


def _overlapping_shares(d: Division) -> LoaderFault:
    """Shares that overlap, in an order that is the same on all ranks unless the overlap changes
    from epoch to epoch, or is what independent draws give; or no shares, where each rank reads
    most of the data."""
    changing = d.shared_by_epoch
    rule = "different-shuffles" if changing or independent(d.worst) else "overlapping-shares"
    read = min(e.samples for e in d.worst.epochs.values())
    if d.worst.complete and 0 < UNDIVIDED * d.worst.length <= read:
        rule = "undivided"
    evidence = {"shared samples by epoch": changing} if changing else {}
    return _fault(
        d,
        "data-overlap",
        rule,
        d.worst,
        d.worst.sharing,
        shared_by_epoch=changing,
        evidence=evidence,
    )


# --- datasets and selections of each rank, without such samplers ----------------------------------


def _different_shards(d: Division) -> LoaderFault | None:
    """Ranks that divide the positions of a dataset of which each holds another one."""
    if not d.differing or not any(partitioned(a) for a in d.audits):
        return None
    return _mismatch(d, d.readers, d.audits[0])


def _leaking_split(d: Division) -> LoaderFault | None:
    others = [other for other in loaders(d.run) if other is not d.loader]
    leak = leaking(d, others) if d.differing and d.loader.trains else None
    if leak is None:
        return None
    sharing = [r for r in d.readers if r.rank.rank in leak.held_out]
    fault = _mismatch(d, sharing, leak.audits[0])
    rank, (count, of) = next(iter(leak.held_out.items()))
    fault.facts = {"count": count, "of": of, "rank": rank}
    held_out = {r: f"{n} of {total}" for r, (n, total) in leak.held_out.items()}
    fault.evidence |= {"held out, but trained on by other ranks": held_out}
    fault.rule, fault.beneath = "leaking-split", leak.audits
    return fault


def _overlapping_selections(d: Division) -> LoaderFault | None:
    over = overlapping(d) if d.loader.trains else None
    if over is None:
        return None
    return LoaderFault(
        "data-overlap",
        "overlapping-selections",
        d.loader,
        over.ranks,
        [r for r in d.readers if r.rank.rank in over.ranks],
        max(over.audits, key=lambda a: len(a.shared)),
        beneath=over.audits,
        selections=over.selected,
        evidence={"selected by each rank": over.selected},
    )


def _unexamined(d: Division) -> Intended | None:
    """Whether another loader that the same line made is known to read other samples on each rank:
    the samples of only some loaders are examined."""
    if all(r.seen.payloads for r in d.readers):
        return None
    for other in loaders(d.run):
        readers = other.of(d.ranks)
        if other is d.loader or other.first.made_at != d.loader.first.made_at or len(readers) < 2:
            continue
        if agreement(readers) is Agreement.DIFFERENT or differences(readers):
            return Intended.UNEXAMINED
    return None


def _rows_of_one_batch(d: Division) -> Intended | None:
    rows = d.audits[0].same_order and d.takes_rows
    return Intended.ROWS_OF_ONE_BATCH if rows else None


def _repeated_parts(d: Division) -> LoaderFault | Intended | None:
    """Data that should be different on each rank, but is the same on some of them."""
    groups = group_by_data(d.readers) if len(d.readers) > 2 else []
    if not 1 < len(groups) < len(d.readers):
        return None
    first, *others = (group[0] for group in groups)
    if any(judged([first, other]) is not Agreement.DIFFERENT for other in others):
        return None
    found = [f for g in groups if d.loader.trains and (f := _repeated(d, g)) is not None]
    if not found:
        return Intended.SHARED_IN_GROUPS
    parts = tuple(f.ranks for f in found)
    return replace(_merged(found)[0], parts=parts)


def _repeated(d: Division, readers: list[Reader]) -> LoaderFault | None:
    """The fault of ranks that read the same data. Ranks with a process group of their own may share
    it on purpose."""
    own = d.of([r.rank.rank for r in readers])
    intended = own.ranks in groups_of(readers[0].rank) or agreement(readers) is not Agreement.SAME
    if not own.audits or intended:
        return None
    fault = _verdict(own, (_rows_of_one_batch, *UNSHARDED))
    if fault is None or fault.doubt is not None:
        return None
    return replace(fault, check="data-overlap", rule="repeated-parts")


# --- ranks that read the same indices without a distributed sampler -------------------------------


def _whole(d: Division) -> bool:
    """Whether every rank reads all that its sampler has."""
    return d.worst.same_sets or all(r.seen.sampler in PLAIN for r in d.readers)


def _unequal_orders(d: Division) -> LoaderFault | None:
    """Samplers without an end whose seeds differ: in the end every rank reads everything, but not
    in the first pass over the data."""
    audit = d.audits[0]
    shared, count = audit.shared_at_first
    seeds = {e.began.seed for e in audit.epochs.values()}
    replaced = any(r.seen.replacement for r in d.readers)
    if len(shared) < FEWEST_SHARED or len(seeds) < 2 or replaced:
        return None
    facts: dict[str, object] = {"shared": len(shared), "first": count * len(d.readers)}
    return _fault(d, "sampler-seed-skew", "different-seeds", audit, facts=facts)


def _divided(d: Division) -> Intended | None:
    """Whether the ranks share few samples, or by chance."""
    exact = _whole(d) or own_orders(d.audits)
    slack = 0 if exact else min(len(d.readers) * d.batch, d.worst.distinct // 2)
    shared = len(d.worst.shared)
    meant = shared <= slack or pads(d.worst, d.batch) or by_chance(d.worst)
    return Intended.DIVIDED if meant else None


def _own_samples(d: Division) -> LoaderFault | Intended | None:
    """Whether each rank holds samples of its own: a share, of a list in an order of its own where
    the source gives it one."""
    if d.samples is not Agreement.DIFFERENT and not known_different(d.readers):
        return None
    ordered = all(r.seen.per_process for r in d.readers)
    return (overlapping_lists(d.loader, d.readers) if ordered else None) or Intended.OWN_SAMPLES


def _repeated_on_purpose(d: Division) -> LoaderFault | Intended | None:
    """Whether every rank reads each sample several times, as for several answers to one question,
    which ranks share out; and what it feeds the model then."""
    if d.worst.times_within < 2:
        return None
    if equal := equal_batches(d.run, d.readers):
        return _fault(
            d,
            "data-overlap",
            "equal-generations",
            d.worst,
            d.worst.sharing,
            evidence={"equal inputs of the model": equal, "times read": d.worst.times_within},
        )
    if unequal_batches(d.run, d.readers):
        return Intended.REPEATED
    return None


def _repeats_for_each_rank(d: Division) -> Intended | None:
    """Whether a sampler that knows its rank repeats each sample once for each of them or more often
    (repeated augmentation)."""
    seen = [r.seen for r in d.readers]
    ranked = len({s.sampler_rank for s in seen}) == len(seen) > 1
    often = all(s.own_order and s.total_size >= len(seen) * s.length > 0 for s in seen)
    return Intended.DIVIDED if ranked and often else None


def _no_sampler(d: Division) -> LoaderFault | None:
    if not _whole(d):
        return None
    fault = _doubted(d, _fault(d, "sampler-missing", "", d.worst, d.worst.sharing))
    if not d.loader.trains:
        fault.rule = "equal-evaluation"
    elif replaceable(d.readers[0], d.worst):
        fault.rule = "no-distributed-sampler"
    else:
        fault.rule = "equal-draws" if _draws_shares(d.worst) else "undivided-selection"
    return fault


def replaceable(reader: Reader, audit: Audit) -> bool:
    """Whether a `DistributedSampler` would select the same samples as the sampler does."""
    sampler = reader.seen.sampler
    whole = audit.complete and not audit.never and not audit.again_within
    return sampler in ("SequentialSampler", "RandomSampler") or (
        sampler == "SubsetRandomSampler" and whole
    )


def _draws_shares(audit: Audit) -> bool:
    """Whether each rank draws, with replacement, no more samples than its share of the dataset."""
    drawn = all(e.seen.replacement for e in audit.epochs.values())
    most = max(e.samples for e in audit.epochs.values())
    return drawn and audit.complete and (most - 1) * len(audit.epochs) < audit.length


def _own_samplers_seeds(d: Division) -> LoaderFault | None:
    """Custom samplers whose seeds differ."""
    own = all(r.seen.own_order for r in d.readers)
    if not own or d.skewed is None or doubt(d.samples, d.readers) is not None:
        return None
    return _fault(d, "sampler-seed-skew", _skew(d.skewed), d.skewed, d.worst.sharing)


def _doubted_shares(d: Division) -> LoaderFault:
    return _doubted(d, _overlapping_shares(d))


def _doubted(d: Division, fault: LoaderFault) -> LoaderFault:
    """The fault with the doubt that equal indices are equal samples. Samples that change each time
    they are read were not compared themselves: what they are made of is evidence then."""
    fault.doubt = doubt(d.samples, d.readers)
    compared = d.samples is not Agreement.RANDOM or fault.doubt is not None
    if sources := [] if compared else equal_sources(d.readers):
        fault.evidence |= {"samples are made of": ", ".join(sources)}
    return fault


UNSHARDED: tuple[Rule, ...] = (
    _unequal_orders,
    _divided,
    _own_samples,
    _repeated_on_purpose,
    _repeats_for_each_rank,
    _no_sampler,
    _own_samplers_seeds,
    _doubted_shares,
)


def _rules(d: Division) -> tuple[Rule, ...]:
    """The rules in the order in which they are asked."""
    first = (_equal_generators, _indices_ignored)
    if d.distributed:
        return (
            *first,
            _wrong_group,
            _different_seeds,
            _different_datasets,
            _no_surplus,
            _smaller_group,
            _overlapping_shares,
        )
    return (
        *first,
        _different_shards,
        _leaking_split,
        _overlapping_selections,
        _unexamined,
        _rows_of_one_batch,
        _repeated_parts,
        *UNSHARDED,
    )


def _mismatch(d: Division, readers: list[Reader], audit: Audit) -> LoaderFault:
    """Ranks that share a dataset by index, but hold different ones."""
    found = difference(readers, d.differing, d.loader)
    return LoaderFault(
        "dataset-mismatch",
        found.rule,
        d.loader,
        found.ranks,
        [r for r in readers if r.rank.rank in found.ranks],
        audit,
        doubt=None if found.selected else Doubt.OWN_TENSORS,
        difference=found,
    )
