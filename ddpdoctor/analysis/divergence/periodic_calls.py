"""The call that ranks made in every (k-th) earlier round and that some skipped in this one."""

from __future__ import annotations

import itertools

from ..calls.call_logs import CallLogs, CallRecord, GroupCalls

HISTORY = 256
"""Earlier calls that are examined."""
_ROUNDS = 2
"""Earlier rounds that have to be equal: fewer prove no habit."""

Said = tuple[tuple[object, ...], tuple[str, ...]]
"""What was called, and the text of the lines that led to it."""

Missed = tuple[CallRecord, tuple[int, ...], int]
"""The call, the ranks that are past it, and the number of earlier rounds."""


def left_out(
    known: CallLogs, logs: dict[int, GroupCalls], index: int, made: dict[int, CallRecord]
) -> Missed | None:
    """The call that was due by all earlier rounds, where some ranks make it and others are past it;
    None where there is none.

    Args:
        index: the number of the present call in the group; made: that of each rank.
    """
    ours = logs[next(iter(made))]
    past = known.window(ours, max(0, index - HISTORY), min(index, HISTORY))
    said = [(m.what, m.text) for m in past]
    return _next(said, made) or _due(said, made)


def _next(said: list[Said], made: dict[int, CallRecord]) -> Missed | None:
    """The call that came next in every earlier round."""
    after = [then for now, then in itertools.pairwise(said) if now == said[-1]]
    after = after[1:]  # in the first round DDP makes an additional call of its own
    if len(after) < _ROUNDS or len(set(after)) > 1:
        return None
    kept = [m for m in made.values() if (m.what, m.text) == after[0]]
    rest = {r: m for r, m in made.items() if m not in kept}
    if not kept or not rest or any((m.what, m.text) not in said for m in rest.values()):
        return None
    if any(_loops(kept[0]) - _loops(m) for m in rest.values()):
        return None  # they may have finished one of the loops around it
    return kept[0], tuple(sorted(rest)), len(after)


def _due(said: list[Said], made: dict[int, CallRecord]) -> Missed | None:
    """The call that came in every k-th round of a loop around all ranks, and is due in this one."""
    for one in made.values():
        what = (one.what, one.text)
        places = [n for n, s in enumerate(said) if s == what]
        rounds = [said[x:y] for x, y in itertools.pairwise([*places, len(said)])][1:]
        rest = {r: m for r, m in made.items() if (m.what, m.text) != what}
        if len(rounds) <= _ROUNDS or any(r != rounds[0] for r in rounds) or not rest:
            continue
        if all((m.what, m.text) in rounds[0] and _loops(m) == _loops(one) for m in rest.values()):
            return (one, tuple(sorted(rest)), len(rounds)) if _loops(one) else None
    return None


def _loops(made: CallRecord) -> set[tuple[str, int]]:
    """The loops around a call."""
    return {
        (spot.file, around.line)
        for place in (made.site.places if made.site else ())
        for around in place.inside
        if (spot := made.rank.location(place.site)) and around.is_loop
    }
