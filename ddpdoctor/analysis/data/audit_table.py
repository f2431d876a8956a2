"""The table "What the loaders delivered": one row per loader and epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ...events import EpochEnded
from ...report.findings import Table
from ...run import Run, fold_numbers, fold_ranks
from .datasets import own_datasets
from .division import divided_loaders
from .epoch_audit import Audit, partitioned
from .loader_check import use
from .loader_faults import of_check
from .loaders import Loader, in_order, loaders, same_order
from .streams import examined_epochs, repeated_order
from .thresholds import FEWEST_TO_ORDER

COLUMNS = ("loader", "epoch", "ranks", "samples", "once", "repeated", "unread", "order")
NOTHING = "-"
LOADERS = 8
"""Most loaders in the table; loaders with equal rows count once."""
ROWS = 8
"""Most rows of one loader; epochs with equal rows share one, and surplus ones in the middle too."""
LISTED = 8
"""Most ranks for which the lengths of their datasets are listed one by one."""


def audit_table(run: Run) -> Iterator[Table]:
    """One table, or none where no loader was iterated."""
    audited = divided_loaders(run)
    overlaps = of_check(run, "data-overlap")
    sets = [f for f in overlaps if f.parts]
    mismatches = [*of_check(run, "dataset-mismatch"), *sets]
    counts: dict[tuple[tuple[str, ...], ...], int] = {}
    for division in audited:
        loader, made = division.loader, division.audits
        own = own_datasets(division.everyone) and not any(partitioned(a) for a in made)
        own = own or _indexless(made[0])
        differs = any(division.ranks.issuperset(f.ranks) for f in mismatches if f.loader is loader)
        found = (f.beneath for f in (*overlaps, *mismatches) if f.loader is loader and f.beneath)
        beneath = next(found, ())
        of_loader = tuple(_rows(loader, beneath or made, not beneath and (own or differs)))
        if of_loader in counts or len(counts) < LOADERS:
            counts[of_loader] = counts.get(of_loader, 0) + 1
    named: Counter[str] = Counter()
    for of_loader, count in counts.items():
        named[of_loader[0][0]] += 1 if count == 1 else -LOADERS
    numbers: Counter[str] = Counter()
    rows = []
    for of_loader, count in counts.items():
        # Loaders that one line makes one after the other are numbered.
        numbers.update(name for name, *_ in of_loader[:1])
        for name, *row in of_loader:
            number = f" #{numbers[name]}" if named[name] > 1 else ""
            rows.append((f"{name}{number}{f' x{count}' * (count > 1)}", *row))
    reported = {id(division.loader) for division in audited}
    for loader in loaders(run):
        if id(loader) not in reported and len(rows) < LOADERS * ROWS:
            rows.append(_unaudited(loader))
    if rows:
        yield Table(title="What the loaders delivered", columns=COLUMNS, rows=tuple(rows))


def _rows(loader: Loader, made: tuple[Audit, ...], own: bool) -> list[tuple[str, ...]]:
    """The rows of one loader. `own`: each rank reads its own dataset."""
    folded: list[tuple[list[int], tuple[str, ...]]] = []
    for audit in made:
        row = _row(audit, made, own)
        if folded and folded[-1][1] == row:
            folded[-1][0].append(audit.number)
        else:
            folded.append(([audit.number], row))
    if len(folded) > ROWS:
        left_out = [n for numbers, _ in folded[ROWS - 2 : -1] for n in numbers]
        ellipsis = ("...",) * (len(COLUMNS) - 2)
        folded = [*folded[: ROWS - 2], (left_out, ellipsis), folded[-1]]
    return [(_name(loader), fold_numbers(numbers), *row) for numbers, row in folded]


def _row(audit: Audit, made: tuple[Audit, ...], own: bool) -> tuple[str, ...]:
    """The columns from `ranks` on. Where each rank reads its own dataset (`own`), equal indices are
    not the same sample, so they are not counted."""
    known = audit.complete or (not own and not audit.never)
    counts = [str(audit.once), str(len(audit.repeated)), str(audit.never) if known else NOTHING]
    of = "" if audit.sampled == 1 else f" (1 in {audit.sampled})"
    return (
        fold_ranks(audit.epochs),
        _lengths(audit) if own else f"{audit.length}{of}",
        *([NOTHING] * 3 if own else counts),
        _order_column(_order(audit, made), left=not known),
    )


def _lengths(audit: Audit) -> str:
    """`40 / 30 (each rank its own)`: the lengths of the ranks' own datasets."""
    listed = _listed([audit.epochs[r].seen.length for r in sorted(audit.epochs)])
    return f"{listed} ({'index ignored' if _indexless(audit) else 'each rank its own'})"


def _listed(lengths: list[int]) -> str:
    equal = len(set(lengths)) == 1
    listed = " / ".join(map(str, lengths[:1] if equal else lengths))
    if not equal and len(lengths) > LISTED:
        listed = f"{min(lengths)} to {max(lengths)}"
    return listed


def _indexless(audit: Audit) -> bool:
    return all(e.seen.indexless for e in audit.epochs.values())


def _order_column(order: str | None, *, left: bool) -> str:
    """`shuffled`, `stopped early`, `sequential, stopped early`."""
    return ", ".join(part for part in (order, "stopped early" if left else None) if part) or NOTHING


def _name(loader: Loader) -> str:
    return f"{loader.label} ({use(loader)})" if loader.used else loader.label


def _order(audit: Audit, made: tuple[Audit, ...]) -> str | None:
    """The order of this epoch, compared with the one before; None while a rank is within it."""
    ends = {r: e.ended for r, e in audit.epochs.items() if e.ended is not None}
    if len(ends) < len(audit.epochs):
        return None
    padded = 0 < sum(e.samples for e in ends.values()) - audit.length < len(ends)
    if all(in_order(e) or (padded and _but_the_last(e, len(ends))) for e in ends.values()):
        return "sequential"
    before = next((a for a in made if a.number == audit.number - 1), None)
    if before is None:
        own = (e.seen.own_order or e.seen.batch_sampler for e in audit.epochs.values())
        return "custom" if any(own) else "shuffled"
    last = {r: e.ended for r, e in before.epochs.items() if e.ended is not None}
    same = [r for r, e in ends.items() if r in last and same_order(last[r], e, FEWEST_TO_ORDER)]
    if not same:
        return "changed"
    return "unchanged" if len(same) == len(ends) else f"unchanged on {fold_ranks(same)}"


def _but_the_last(ended: EpochEnded, ranks: int) -> bool:
    """Whether the indices of a short epoch rose, except for a last one from the begin of the
    dataset, as padding is."""
    *rising, last = ended.head or (0,)
    return len(ended.head) == ended.samples and rising == sorted(rising) and last < ranks


def _unaudited(loader: Loader) -> tuple[str, ...]:
    """The row of a loader without indices, or that only one rank iterates."""
    readers = list(loader.readers.values())
    length = readers[0].seen.length
    lengths = [r.seen.length for r in readers]
    epochs = max(len(r.epochs) for r in readers)
    over = [r for r in readers if any(e.ended is not None for e in r.epochs)]
    # Of a stream the samples are not known: the last batch of each worker may be a smaller one.
    stream = length < 0
    ended = [e.ended for r in readers for e in r.epochs if e.ended is not None]
    read = sorted({e.batches if stream else e.samples for e in ended})
    amount = " to ".join(map(str, dict.fromkeys((read[0], read[-1])))) if read else ""
    whose = " by each" if len(over) > 1 else ""
    delivered = f", {amount} {'batches ' if stream else ''}read{whose}" if read else ""
    left = any(e.ended is None for r in readers for e in r.epochs)
    return (
        _name(loader),
        fold_numbers(range(epochs)),
        fold_ranks(loader.readers),
        f"{'stream' if stream else _listed(lengths)}{delivered}",
        NOTHING,
        NOTHING,
        NOTHING,
        _order_column(_order_of_stream(loader), left=left),
    )


def _order_of_stream(loader: Loader) -> str | None:
    """Whether the examined epochs of a stream repeat the order of the one before on some rank."""
    pairs = [
        same
        for reader in loader.readers.values()
        for old, new in pairwise(examined_epochs(reader))
        if (same := repeated_order(old, new)) is not None
    ]
    return ("unchanged" if any(pairs) else "changed") if pairs else None
