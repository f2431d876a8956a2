"""Which evaluations of several ranks belong together: a rank may also evaluate alone."""

from __future__ import annotations

from collections import Counter

from ...events.drift import AGAIN

Row = tuple[int, tuple[int, ...], int]
"""(stride, digests, synchronised backwards so far) of one rank at one moment."""

Tables = dict[int, dict[int, Row]]
"""By rank, the rows by moment."""


def together(tables: Tables) -> None:
    """Keep later evaluations only where all ranks evaluated equally often since they trained, and
    all of these were examined: a rank that evaluates alone may use other weights for it.

    Removes rows from `tables`.
    """
    often = {n: Counter(key // AGAIN for key in table) for n, table in tables.items()}
    for number, table in tables.items():
        for key in list(table):
            times = {counts[key // AGAIN] for counts in often.values()}
            if times != {often[number][key // AGAIN]} or AGAIN - 1 in times:
                del table[key]


def alone(tables: Tables, later: Tables) -> None:
    """Drop first evaluations that differ where a rank evaluated more often since it trained, and
    had at another evaluation the same values as the others: it may have run the first one alone,
    before all ranks loaded other weights.

    Removes rows from `tables`.
    """
    for key in {key for table in tables.values() for key in table}:
        looks = [
            [table[key][1], *(row[1] for again, row in later[n].items() if again // AGAIN == key)]
            for n, table in tables.items()
            if key in table
        ]
        differ = len({first for first, *_ in looks}) > 1 and len({*map(len, looks)}) > 1
        if differ and set.intersection(*map(set, looks)):
            for table in tables.values():
                table.pop(key, None)
