"""Whether the ranks' datasets are the same: by what they are made of, and by their samples."""

from __future__ import annotations

from collections.abc import Sequence

from ...events import Payload
from ...events.pack import unpack
from ...run import equal_ranks, odd_ones
from .content import Agreement, agreement, any_column_differs, by_index, moved_samples, rows
from .fault import Difference, Doubt
from .loaders import Loader, Reader
from .thresholds import FEWEST_ALIKE, MOVED, NO_ACCIDENT


def differences(readers: Sequence[Reader]) -> list[tuple[Payload, Payload]]:
    """What differs in the ranks' datasets: a payload of the first rank, and that of another."""
    first, *others = readers
    found: dict[str, tuple[Payload, Payload]] = {}
    mine = {p.name: p for p in first.seen.payloads}
    for theirs in (p for other in others for p in other.seen.payloads):
        own = mine.get(theirs.name)
        if own is not None and (own.order, own.length) != (theirs.order, theirs.length):
            found.setdefault(own.name, (own, theirs))
    return list(found.values())


def _reordered(mine: Payload, theirs: Payload) -> bool:
    """Whether two payloads hold the same entries, in another order."""
    return bool(mine.content) and mine.content == theirs.content


def _deliberate(mine: Payload, theirs: Payload) -> bool:
    """Whether two payloads differ in selection or order, not just in random numbers that each rank
    drew."""
    chosen = mine.kind in ("indices", "choice", "text")
    return chosen or _reordered(mine, theirs) or mine.length != theirs.length


def difference(
    readers: Sequence[Reader], differing: Sequence[tuple[Payload, Payload]], loader: Loader
) -> Difference:
    """How the datasets of these readers of a loader differ: by the payload that each rank selected
    or ordered by itself, if there is one (see `differences`)."""
    mine, theirs = next((p for p in differing if _deliberate(*p)), differing[0])
    deliberate, others = _deliberate(mine, theirs), _beside(mine, theirs, differing)
    if others is not None:
        mine, theirs = others
    moved, of = (0, 0) if deliberate else _moved(readers)
    chosen = moved >= max(NO_ACCIDENT, MOVED * of)
    alike = (0, 0) if deliberate or chosen else _alike(readers, mine.name)
    digests = {r.rank.rank: _digest_of(r, mine.name) for r in readers}
    ranks = odd_ones(equal_ranks(digests)) or tuple(digests)
    concerned = next(r for r in readers if r.rank.rank in ranks)
    names = tuple(m.name for m, _ in differing)
    return Difference(
        ranks=ranks,
        names=names,
        kind="chosen" if others is not None else "choice" if chosen else mine.kind,
        selected=deliberate or chosen or alike[0] > 0,
        reordered=_reordered(mine, theirs),
        digests=digests,
        moved=(moved, of) if chosen else (0, 0),
        lengths={n: reader.seen.length for n, reader in loader.readers.items()},
        distributed=concerned.seen.distributed,
        split=concerned.split(names),
        alike=alike,
    )


def _beside(
    mine: Payload, theirs: Payload, differing: Sequence[tuple[Payload, Payload]]
) -> tuple[Payload, Payload] | None:
    """What shows that entries in another order, such as labels, are of other samples: a payload
    beside them, of as many entries, that holds other ones."""
    if not _reordered(mine, theirs):
        return None
    beside = (
        (m, t)
        for m, t in differing
        if m.content and t.content and m.content != t.content
        if m.length == t.length == mine.length
    )
    return next(beside, None)


def _alike(readers: Sequence[Reader], name: str) -> tuple[int, int]:
    """How many parts of the entries are the same on all ranks, and of how many; (0, 0) for fewer
    than `FEWEST_ALIKE`. Parts that equal each other are padding, or filled with one number."""
    rows = [
        unpack(p.pieces) for r in readers for p in r.seen.payloads if p.name == name and p.pieces
    ]
    if len(rows) < len(readers) or len({len(row) for row in rows}) > 1:
        return 0, 0
    same = sum(
        len(set(part)) == 1 and rows[0].count(part[0]) == 1 for part in zip(*rows, strict=True)
    )
    return (same, len(rows[0])) if same >= FEWEST_ALIKE else (0, 0)


def _moved(readers: Sequence[Reader]) -> tuple[int, int]:
    """As `moved_samples`, for the first rank and the one that holds the most of its samples."""
    mine, *others = map(by_index, readers)
    return max((moved_samples(mine, theirs) for theirs in others), default=(0, 0))


def _digest_of(reader: Reader, name: str) -> str:
    found = next((p for p in reader.seen.payloads if p.name == name), None)
    return f"{found.order:08x} of {found.length}" if found else "none"


def judged(readers: Sequence[Reader]) -> Agreement:
    """As `agreement`, but datasets that are made of other entries or have other settings on other
    ranks count, too, where samples alone do not decide."""
    answer = agreement(readers)
    if differences(readers) and (answer is Agreement.UNKNOWN or any_column_differs(readers)):
        return Agreement.DIFFERENT
    if answer is Agreement.RANDOM and settings_differ(readers):
        return Agreement.DIFFERENT
    return answer


def known_different(readers: Sequence[Reader]) -> bool:
    """Whether equal indices are known to stand for other samples on each rank."""
    if len(readers) < 2:
        return False
    differing = differences(readers)
    if differing and all(_reordered(*pair) for pair in differing):
        return False
    answer = judged(readers)
    lengths = {r.seen.length for r in readers}
    return answer is Agreement.DIFFERENT or (len(lengths) > 1 and answer is not Agreement.SAME)


def own_datasets(readers: Sequence[Reader]) -> bool:
    """Whether each rank is known to read its own dataset, without a distributed sampler."""
    return not any(r.seen.distributed for r in readers) and known_different(readers)


def doubt(answer: Agreement, readers: Sequence[Reader]) -> Doubt | None:
    """Why ranks with equal indices may still read different samples; None where they do not."""
    if answer is Agreement.SAME or (answer is Agreement.RANDOM and equal_sources(readers)):
        return None
    if answer is Agreement.RANDOM:
        return Doubt.RANDOM_SAMPLES
    listed = all(r.seen.payloads for r in readers)
    if any(e.content for r in readers for e in r.looked):
        constant = any(_constant(r) for r in readers)
        if listed and not constant:
            return None
        one = max((len(by_index(r)) for r in readers), default=0) < 2
        if one or not constant:
            return Doubt.ONE_SAMPLE if one else Doubt.FEW_SAMPLES
        return Doubt.EQUAL_SAMPLES
    return None if listed else Doubt.UNREADABLE


def _constant(reader: Reader) -> bool:
    """Whether all examined samples of a rank are identical."""
    found = [row for e in reader.looked for _, row in rows(e)]
    return len(found) > 1 and len(set(found)) == 1


def equal_sources(readers: Sequence[Reader]) -> list[str]:
    """Names of what the datasets make each sample of, where that and all their settings are the
    same on all ranks. Texts count on one machine only: equal paths may be other files on another.
    """
    first = readers[0]
    if not first.seen.settings or len({r.seen.settings for r in readers}) > 1:
        return []
    one_machine = len({r.rank.node for r in readers}) < len(readers)
    common = set.intersection(
        *({(p.name, p.order, p.length) for p in r.seen.payloads} for r in readers)
    )
    return [
        p.name
        for p in first.seen.payloads
        if p.tells and (p.name, p.order, p.length) in common and (p.kind != "text" or one_machine)
    ]


def settings_differ(readers: Sequence[Reader]) -> bool:
    """Whether the datasets have other settings (the rank, say) on other ranks, and none is known
    to take its entry at the very index that it is given."""
    settings = {r.seen.settings for r in readers}
    tells = any(p.tells for r in readers for p in r.seen.payloads)
    return len(settings) > 1 and 0 not in settings and not tells


def group_by_data(readers: Sequence[Reader]) -> list[list[Reader]]:
    """The readers in groups with equal digests at all indices that every one of them has on record,
    and with datasets made of the same entries."""
    samples = [by_index(r) for r in readers]
    common = sorted(set.intersection(*map(set, samples)))
    groups: dict[object, list[Reader]] = {}
    for reader, found in zip(readers, samples, strict=True):
        made_of = tuple((p.name, p.order, p.length) for p in reader.seen.payloads)
        key = reader.seen.length, made_of, tuple(found[i] for i in common)
        groups.setdefault(key, []).append(reader)
    return list(groups.values())
