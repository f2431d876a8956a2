"""Ranks that wait for each other in a cycle of messages: who is at fault, by the order of calls."""

from __future__ import annotations

from ...run import ranks_do, ranks_text
from .snapshot import RankSnapshot, Snapshot

SEVERAL_ROUNDS = 2
"""Steps after which a message that a rank has skipped is known by its habit (`unsent`)."""


def wrong_peers(now: Snapshot, ring: list[RankSnapshot]) -> tuple[str, str] | None:
    """Cause and fix, where all ranks exchange messages in one batch and none receives from a rank
    that sends to it; otherwise None."""
    sent: dict[int, list[int]] = {}
    for rank, stand in now.by_rank.items():
        for peer in stand.made.signature.sends if stand.made else ():
            sent.setdefault(peer, []).append(rank)
    for stand in ring:
        taken = set(stand.made.signature.receives if stand.made else ())
        given = set(sent.get(stand.rank.rank, ()))
        if not taken or not given or taken & given:
            return None
    made, first = ring[0].made, ring[0].rank.rank
    takes = sorted(set(made.signature.receives)) if made else []
    gives = sent[first]
    return (
        f"no rank receives from the rank that sends to it: rank {first} receives from "
        f"{ranks_text(takes)}, but {ranks_do(gives, 'send')} to it",
        "check the peers of the receives: a rank that sends to `(rank + 1) % world_size` receives "
        "from `(rank - 1) % world_size`",
    )


def gone_on(collective: RankSnapshot, waiting: RankSnapshot) -> tuple[str, str]:
    """Cause and fix, where one rank is in a collective and another waits to exchange a message with
    it."""
    rank, other = collective.rank.rank, waiting.rank.rank
    op = waiting.made.signature.op if waiting.made else ""
    answer = {"send": "recv", "isend": "irecv", "recv": "send", "irecv": "isend"}.get(op, "")
    call = f"`dist.{answer}`" if answer else "call"
    place = collective.made.place if collective.made else "a collective"
    return (
        f"rank {rank} reached {place} without the {call} that rank {other} waits for: it is "
        "missing, or comes only afterwards",
        f"make the matching {call} on rank {rank} before that, or remove the message on rank "
        f"{other}",
    )


def met_without(
    now: Snapshot, collective: RankSnapshot, absent: RankSnapshot
) -> list[RankSnapshot]:
    """The members of a group that are in one collective, if these are all but one rank, and more
    than one; else empty. That rank has taken as many steps: it went past the collective, and is
    not on its way to it."""
    key, call = collective.key, collective.call
    if key is None or call is None or absent.rank.rank not in key.ranks:
        return []
    stands = [now.by_rank[r] for r in key.ranks if r in now.by_rank]
    met = [s for s in stands if s.key == key and s.call and s.call.index == call.index]
    past = absent.rank.steps >= max([SEVERAL_ROUNDS, *(s.rank.steps for s in met)])
    return met if past and len(met) == len(key.ranks) - 1 > 1 and absent not in met else []


def in_a_cycle(ring: list[RankSnapshot]) -> str:
    """What the ranks of a cycle wait for, by what they wait in."""
    ops = {stand.made.signature.op if stand.made else "" for stand in ring}
    if ops <= {"send", "isend"}:
        return (
            "each of them waits until another one receives its message, which that one does only "
            "afterwards, or not at all"
        )
    if ops <= {"recv", "irecv"}:
        return "each of them waits for a message that is sent only afterwards, or not at all"
    return (
        "each of them waits for another one to send or to receive, which that one does only "
        "afterwards, or not at all"
    )
