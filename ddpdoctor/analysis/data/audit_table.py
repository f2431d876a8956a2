"""The audit as a table: what every loader delivered, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator

from ...events import EpochEnded
from ...report.findings import Table
from ...run import Run, fold_ranks
from .epoch_audit import Audit, audits, partitioned
from .loader_faults import of_check, own_data
from .loaders import Loader, in_order, loaders
from .phrases import use

COLUMNS = ("loader", "epoch", "ranks", "samples", "once", "more", "never", "order")
LOADERS = 8
ROWS = 8
"""Of one loader; equal epochs share one, and so do those in the middle that are too many. Loaders
of one line with equal rows are told once."""
FEWEST = 8
"""Indices that tell one order from another."""
LISTED = 8
"""Ranks whose data sets' lengths are listed one by one."""


def audit_table(run: Run) -> Iterator[Table]:
    """One table, or none where no loader was iterated."""
    audited = audits(run)
    overlaps = of_check(run, "data-overlap")
    sets = [f for f in overlaps if f.parts]
    apart = [*of_check(run, "dataset-mismatch"), *sets]
    alike: dict[tuple[tuple[str, ...], ...], int] = {}
    for loader, ranks, made in audited:
        own = own_data(loader.of(ranks)) and not any(partitioned(a) for a in made)
        own = own or _indexless(made[0])
        unlike = any(ranks.issuperset(f.ranks) for f in apart if f.loader is loader)
        found = (f.beneath for f in (*overlaps, *apart) if f.loader is loader and f.beneath)
        beneath = next(found, ())
        of_loader = tuple(_rows(loader, beneath or made, not beneath and (own or unlike)))
        if of_loader in alike or len(alike) < LOADERS:
            alike[of_loader] = alike.get(of_loader, 0) + 1
    rows = [
        (f"{name} x{count}" if count > 1 else name, *row)
        for of_loader, count in alike.items()
        for name, *row in of_loader
    ]
    reported = {id(loader) for loader, _, _ in audited}
    for loader in loaders(run):
        if id(loader) not in reported and len(rows) < LOADERS * ROWS:
            rows.append(_unaudited(loader))
    if rows:
        yield Table(title="What the loaders delivered", columns=COLUMNS, rows=tuple(rows))


def _rows(loader: Loader, made: tuple[Audit, ...], own: bool) -> list[tuple[str, ...]]:
    folded: list[tuple[list[int], tuple[str, ...]]] = []
    for audit in made:
        said = _said_apart(audit, made) if own else _said(audit, made)
        if folded and folded[-1][1] == said:
            folded[-1][0].append(audit.number)
        else:
            folded.append(([audit.number], said))
    if len(folded) > ROWS:
        left_out = [n for numbers, _ in folded[ROWS - 2 : -1] for n in numbers]
        unlike = ("...",) * (len(COLUMNS) - 2)
        folded = [*folded[: ROWS - 2], (left_out, unlike), folded[-1]]
    return [(_name(loader), fold_ranks(numbers), *said) for numbers, said in folded]


def _said(audit: Audit, made: tuple[Audit, ...]) -> tuple[str, ...]:
    of = "" if audit.sampled == 1 else f" (1 in {audit.sampled})"
    return (
        fold_ranks(audit.epochs),
        f"{audit.length}{of}",
        str(audit.once),
        str(len(audit.repeated)),
        str(audit.never) if _known(audit) else "-",
        _order(audit, made) if _known(audit) else _left(_order(audit, made)),
    )


def _said_apart(audit: Audit, made: tuple[Audit, ...]) -> tuple[str, ...]:
    """Of ranks that each read a data set of their own: its indices say nothing about others'."""
    lengths = [audit.epochs[r].seen.length for r in sorted(audit.epochs)]
    alike = len(set(lengths)) == 1
    whose = "whatever the index" if _indexless(audit) else "each rank its own"
    reported = " / ".join(map(str, lengths[:1] if alike else lengths))
    if not alike and len(lengths) > LISTED:
        reported = f"{min(lengths)} to {max(lengths)}"
    return (
        fold_ranks(audit.epochs),
        f"{reported} ({whose})",
        "-",
        "-",
        "-",
        _order(audit, made) if audit.complete else _left(_order(audit, made)),
    )


def _indexless(audit: Audit) -> bool:
    return all(e.seen.indexless for e in audit.epochs.values())


def _known(audit: Audit) -> bool:
    """Whether it is known what nobody read."""
    return audit.complete or not audit.never


def _left(order: str) -> str:
    return "left early" if order == "-" else f"{order}, left early"


def _name(loader: Loader) -> str:
    return f"{loader.label} ({use(loader)})" if loader.used else loader.label


def _order(audit: Audit, made: tuple[Audit, ...]) -> str:
    """Of this epoch, against the one before."""
    ends = {r: e.ended for r, e in audit.epochs.items() if e.ended is not None}
    if len(ends) < len(audit.epochs):
        return "-"
    padded = 0 < sum(e.samples for e in ends.values()) - audit.length < len(ends)
    if all(in_order(e) or (padded and _but_the_last(e, len(ends))) for e in ends.values()):
        return "in order"
    before = next((a for a in made if a.number == audit.number - 1), None)
    if before is None:
        return "shuffled"
    last = {r: e.ended for r, e in before.epochs.items() if e.ended is not None}
    same = [r for r, e in ends.items() if r in last and _same(last[r], e)]
    if not same:
        return "new"
    return "as before" if len(same) == len(ends) else f"as before on {fold_ranks(same)}"


def _but_the_last(ended: EpochEnded, ranks: int) -> bool:
    """The few indices rose, but for one that begins the data set again, as padding does."""
    *rising, last = ended.head or (0,)
    return len(ended.head) == ended.samples and rising == sorted(rising) and last < ranks


def _same(before: EpochEnded, now: EpochEnded) -> bool:
    """Of one that was left early only the first indices can be the same."""
    if before.samples == now.samples:
        return before.order == now.order
    count = min(len(before.head), len(now.head))
    return count >= FEWEST and before.head[:count] == now.head[:count]


def _unaudited(loader: Loader) -> tuple[str, ...]:
    """Loaders without indices, and those that one rank alone iterates."""
    readers = list(loader.readers.values())
    length = readers[0].seen.length
    epochs = max(len(r.epochs) for r in readers)
    over = [r for r in readers if any(e.ended is not None for e in r.epochs)]
    read = sorted({e.samples for r in readers for e in r.epochs if e.ended is not None})
    whose = "read by each" if len(over) > 1 else "read"
    left = any(e.ended is None for r in readers for e in r.epochs)
    return (
        _name(loader),
        fold_ranks(range(epochs)),
        fold_ranks(loader.readers),
        str(length) if length >= 0 else "stream",
        f"{' to '.join(map(str, dict.fromkeys((read[0], read[-1]))))} {whose}" if read else "-",
        "-",
        "-",
        _left("-") if left else "-",
    )
