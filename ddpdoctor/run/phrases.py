"""Phrases that sentences for people are made of: lists of ranks, plurals, "and 4 more".

Checks take them from here, so that all of them write the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

MOST_NAMED = 2
FEWEST_APART = 6
"""So many numbers at equal distances are not all named."""


@dataclass(frozen=True)
class Fold:
    """Ranks that did the same: `kept` are examined, and what is true of all of these is told of the
    `others`, too."""

    kept: frozenset[int]
    others: tuple[int, ...]


_folds: ContextVar[Sequence[Fold]] = ContextVar("folds", default=())


@contextmanager
def told_of(folds: Sequence[Fold]) -> Iterator[None]:
    """Meanwhile, whoever names all `kept` ranks of a fold names the others as well."""
    token = _folds.set(folds)
    try:
        yield
    finally:
        _folds.reset(token)


def with_folded(ranks: Iterable[int]) -> set[int]:
    """These ranks and those that did the same, within `told_of`."""
    named = set(ranks)
    for fold in _folds.get():
        if fold.kept <= named:
            named.update(fold.others)
    return named


def some(values: Iterable[object], limit: int = MOST_NAMED, of: str = "") -> str:
    """`a`, `a and b`, `a, b and 37 more`; `of`: more of what (`and 3 more values`)."""
    every = [str(value) for value in values]
    more = len(every) - limit
    return listed([*every[:limit], f"{more} more{of and ' '}{of}"] if more > 0 else every)


def named(names: Sequence[str], positions: Iterable[int], limit: int = 4) -> str:
    """The names at these positions, as `some` writes them."""
    return some((names[i] for i in positions), limit)


def counted(number: int, word: str, words: str = "") -> str:
    """`1 error`, `2 errors`, `1 000 batches`; `words`: an irregular plural."""
    return f"{number:,} ".replace(",", " ") + plural(number, word, words)


def plural(number: int, word: str, words: str = "") -> str:
    """`step` for 1, `steps` for other numbers; `words`: an irregular plural."""
    return word if number == 1 else words or f"{word}s"


def listed(values: Sequence[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    every = [str(value) for value in values]
    return " and ".join(part for part in (", ".join(every[:-1]), *every[-1:]) if part)


def whom(ranks: Iterable[int], world_size: int) -> str:
    """`rank 1`, `ranks 0,2-3`; `both ranks` or `all 4 ranks` where it is everyone."""
    known = with_folded(ranks)
    if len(known) == world_size > 1:
        return f"all {len(known)} ranks" if len(known) > 2 else "both ranks"
    return ranks_text(known)


def fold_ranks(ranks: Iterable[int]) -> str:
    """`0-2,5` for ranks 0, 1, 2, 5."""
    return fold_numbers(with_folded(ranks))


def fold_numbers(numbers: Iterable[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5; `3,11,...,59` for many at equal distances."""
    every = sorted(set(numbers))
    parts, at = [], 0
    while at < len(every):
        first, apart = every[at], every[at + 1] - every[at] if at + 1 < len(every) else 1
        count = 1
        while at + count < len(every) and every[at + count] == first + count * apart:
            count += 1
        last = first + (count - 1) * apart
        if apart > 1 and count < FEWEST_APART:
            parts.append(str(first))
            at += 1
            continue
        ends = f"{first},{first + apart},...,{last}" if apart > 1 else f"{first}-{last}"
        parts.append(ends if count > 1 else str(first))
        at += count
    return ",".join(parts)


def unfolded(text: str) -> set[int]:
    """The ranks that `fold_ranks` wrote."""
    found: set[int] = set()
    parts = text.split(",")
    for number, part in enumerate(parts):
        if part == "...":
            first, second, last = (int(parts[number + n]) for n in (-2, -1, 1))
            found.update(range(first, last, second - first))
        else:
            begin, _, end = part.partition("-")
            found.update(range(int(begin), int(end or begin) + 1))
    return found


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0,2-3`."""
    known = with_folded(ranks)
    return f"rank{'' if len(known) == 1 else 's'} {fold_ranks(known)}"


def ranks_were(ranks: Iterable[int]) -> str:
    """`rank 1 was`, `ranks 0,2-3 were`."""
    known = with_folded(ranks)
    return f"{ranks_text(known)} {'was' if len(known) == 1 else 'were'}"


def ranks_do(ranks: Iterable[int], verb: str) -> str:
    """`rank 1 skips`, `ranks 0,2-3 skip`, for a regular verb."""
    known = with_folded(ranks)
    return f"{ranks_text(known)} {verb}{'s' if len(known) == 1 else ''}"


def groups_text(groups: Iterable[Sequence[int]]) -> list[str]:
    """Each of the groups of equal ranks: `rank 1 alone`, `ranks 0,2-3 alike`."""
    return [f"{ranks_text(g)} {'alone' if len(g) == 1 else 'alike'}" for g in groups]
