"""The call that a rank made in every earlier round and has left out in this one."""

from __future__ import annotations

import itertools

from ..calls.call_logs import CallLogs, CallRecord, GroupCalls

HISTORY = 256
_ROUNDS = 2
"""Earlier rounds that have to agree."""

Said = tuple[tuple[object, ...], tuple[str, ...]]
"""What was called, and on which lines."""

Missed = tuple[CallRecord, tuple[int, ...], int]
"""The call, the ranks that are already at another one, and the number of earlier rounds."""


def left_out(
    known: CallLogs, logs: dict[int, GroupCalls], index: int, made: dict[int, CallRecord]
) -> Missed | None:
    """The call that was next by all earlier rounds, where some make it and others are further."""
    ours = logs[next(iter(made))]
    past = known.window(ours, max(0, index - HISTORY), min(index, HISTORY))
    said = [(m.what, m.text) for m in past]
    return _next(said, made) or _due(said, made)


def _next(said: list[Said], made: dict[int, CallRecord]) -> Missed | None:
    """What came next in every earlier round."""
    after = [then for now, then in itertools.pairwise(said) if now == said[-1]]
    after = after[1:]  # in the first round DDP makes a call of its own
    if len(after) < _ROUNDS or len(set(after)) > 1:
        return None
    kept = [m for m in made.values() if (m.what, m.text) == after[0]]
    rest = {r: m for r, m in made.items() if m not in kept}
    if not kept or not rest or any((m.what, m.text) not in said for m in rest.values()):
        return None
    if any(_loops(kept[0]) - _loops(m) for m in rest.values()):
        return None  # they may be through with one of its loops
    return kept[0], tuple(sorted(rest)), len(after)


def _due(said: list[Said], made: dict[int, CallRecord]) -> Missed | None:
    """What came at every k-th round of a loop that all ranks are in, and would at this one."""
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
        if (spot := made.rank.location(place.site)) and around.text.startswith(("for ", "while "))
    }
