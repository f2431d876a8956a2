"""Sets of ranks in words, and ranks by what they have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence


def fold_ranks(ranks: Iterable[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def unfolded(text: str) -> set[int]:
    """The ranks that `fold_ranks` wrote."""
    spans = (part.partition("-") for part in text.split(","))
    return {n for first, _, last in spans for n in range(int(first), int(last or first) + 1)}


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0,2-3`."""
    known = set(ranks)
    return f"rank{'' if len(known) == 1 else 's'} {fold_ranks(known)}"


def ranks_were(ranks: Iterable[int]) -> str:
    """`rank 1 was`, `ranks 0,2-3 were`."""
    known = set(ranks)
    return f"{ranks_text(known)} {'was' if len(known) == 1 else 'were'}"


def ranks_do(ranks: Iterable[int], verb: str) -> str:
    """`rank 1 skips`, `ranks 0,2-3 skip`, for a regular verb."""
    known = set(ranks)
    return f"{ranks_text(known)} {verb}{'s' if len(known) == 1 else ''}"


def equal_ranks(values: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    """The ranks in groups of equal values, the largest first."""
    groups: dict[Hashable, list[int]] = {}
    for number, value in values.items():
        groups.setdefault(value, []).append(number)
    return sorted((tuple(g) for g in groups.values()), key=lambda g: (-len(g), g))


def odd_ones(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of such groups, the ranks that are not as most others; all of them where there is no
    majority."""
    majority = len(groups) == 1 or len(groups[0]) > len(groups[1])
    return tuple(sorted(r for g in (groups[1:] if majority else groups) for r in g))


def groups_text(groups: Iterable[Sequence[int]]) -> list[str]:
    """Each of the groups of equal ranks: `rank 1 alone`, `ranks 0,2-3 alike`."""
    return [f"{ranks_text(g)} {'alone' if len(g) == 1 else 'alike'}" for g in groups]
