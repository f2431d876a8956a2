"""DDP609."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddpdoctor.analysis.control_flow.jumps import ways_around
from ddpdoctor.analysis.divergence import thread_waits
from ddpdoctor.analysis.divergence.missing_calls import Unsent, unsent
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, scene
from ddpdoctor.analysis.waiting.stale_store import CAUSE, FIX, formed_again
from ddpdoctor.analysis.waiting.wait_graph import (
    across_groups,
    cycles,
    gone,
    in_init,
    merged_stacks,
    missing,
    pending,
    victims,
)
from ddpdoctor.events import CommHook
from ddpdoctor.report.findings import (
    Check,
    Confidence,
    Evidence,
    Finding,
    FixKind,
    Related,
    Severity,
)
from ddpdoctor.run import Location, Run, ranks_do, ranks_text

_STORE = re.compile(r"store\w*(?:\(\))?\.(?:get|wait)\(", re.IGNORECASE)
"""Waits in torch until another rank has set the key."""


class Stall(Check):
    """No rank makes progress

    ## What it finds
    A run that stands still without a rank that the others wait for: all ranks are in the same
    collective (the network, or the devices), all are in their own code, they wait for each other
    in a ring (`recv` on both sides), or have left the group and do not end (a thread that is no
    daemon). The stacks are merged: equal ones are shown once, the least progressed first.

    ## How it knows
    Each rank writes down every call before it makes it, and where it is in its step. A ring shows
    in what the ranks have begun to send, to receive and to call: each waits for what the next one
    has not begun; it is proven, and an error. Otherwise the run must have stood still for the stall
    time (see `rank-missing`) without a rank that the others wait for: the node's monitor then takes
    the stacks, and the finding is suspected.

    ## Why it hurts
    The job holds its machines and does nothing.

    ## How to fix it
    A ring: let one side send first, or use `batch_isend_irecv`; where a rank left out a message
    that it sent in every earlier round, or waits for one more than in these, it is named with the
    line. All in one collective: look at the network and, on GPUs, at peer-to-peer access
    (`NCCL_P2P_DISABLE=1` tells); a group that was formed again over the store of an earlier one is
    told as that. Otherwise the stacks say where the program is.

    ## When it stays quiet
    Pauses for evaluation and checkpoints: the stall time is learned from the run.
    """

    code = "DDP609"
    name = "stall"
    family = "hang"
    severity = Severity.WARNING

    def examine(self, run: Run) -> Iterable[Finding]:
        now = scene(run)
        rings = cycles(now)
        ring = rings[0] if rings else []
        if ring and across_groups([now.stands[r] for r in ring]):
            return  # told by collective-mismatch
        if ring:
            for first, *others in _alike(now, [[now.stands[r] for r in one] for one in rings]):
                yield self._ring(now, first, others)
        elif now.stall is not None and not missing(now) and not gone(now) and not in_init(now):
            known = [s for s in now.stands.values() if s.rank.started]
            stands = [s for s in known if not s.gone]
            left = [s for s in known if s.stood and s.stood.at >= now.stall.at]
            if stands:
                yield self._still(now, stands)
            elif left:
                yield self._leaving(now, left)

    def _ring(
        self, now: Snapshot, ring: list[RankSnapshot], others: list[list[RankSnapshot]]
    ) -> Finding:
        first, more = ring[0], [s for other in others for s in other]
        reported = ", ".join(
            f"rank {s.rank.rank} waits {s.doing} for rank {o.rank.rank}"
            for s, o in zip(ring, [*ring[1:], ring[0]], strict=True)
        )
        reported = f"ranks wait for each other, so that none can go on: {reported}"
        if more:
            reported += (
                f"; so do {ranks_text(sorted(s.rank.rank for s in more))}, on the same lines"
            )
        evidence: Evidence = {
            "cycle": " -> ".join(str(s.rank.rank) for s in (*ring, first)),
            "stuck": not now.failed,
            **victims(now, [*ring, *more]),
            "stacks": merged_stacks(now),
        }
        at = now.at - max(s.still_s for s in (*ring, *more))
        if missed := unsent(now, ring):
            return self._unsent(missed, reported, evidence, at)
        cause = "every one of them waits for a message that is only sent afterwards, or not at all"
        fix = (
            "let one side send first and the other receive first, or use `dist.batch_isend_irecv`; "
            "where the order is right, let no rank wait for a message more than the other one sends"
        )
        on = next((i for i, s in enumerate(ring) if s.call is not None and s.call.peer < 0), None)
        if wrong := _wrong_peers(now, ring):
            cause, fix = wrong
        elif on is not None:
            cause, fix = _gone_on(ring[on], ring[on - 1])
        return self.finding(
            severity=Severity.ERROR,
            ranks=tuple(sorted(s.rank.rank for s in (*ring, *more))),
            steps=first.steps,
            location=first.location,
            label=f"rank {first.rank.rank} waits here",
            related=_waits(ring),
            summary=reported,
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence=evidence,
            at=at,
        )

    def _unsent(self, missed: Unsent, reported: str, evidence: Evidence, at: float) -> Finding:
        """The order was right in all earlier rounds: in this one a rank left out its call, or made
        the one before that once more."""
        rank, waiting = missed.stand.rank.rank, missed.waiting.rank.rank
        made, now = missed.made, missed.stand.made
        ways = ways_around(made, ends=missed.ended)
        where = ways[0] if len(ways) == 1 else made.location
        label = f"rank {rank} left out its {made.signature.op}"
        summary = f"rank {rank} left out {made.place}, for which rank {waiting} waits"
        cause = (
            f"rank {rank} made that call in each of its last {missed.rounds} rounds, and in this "
            "one it did not"
        )
        fix = f"make the call in every round, or leave it out on rank {waiting} as well"
        if missed.usual and now is not None:
            where, label = now.location, f"rank {rank} called this once more"
            summary = f"rank {rank} calls {now.place} once more than in its earlier rounds"
            cause = (
                f"in each of its last {missed.rounds} rounds rank {rank} made that call "
                f"{missed.usual} times in a row and then {made.place}, for which rank {waiting} "
                f"waits; in this round it calls it {missed.usual + 1} times"
            )
            fix = (
                f"let ranks {rank} and {waiting} exchange as many messages in every round: compute "
                "their number from values that are equal on both"
            )
        spots = (
            *((f"may have led rank {rank} around it", way) for way in ways[:2] if missed.ended),
            (f"rank {rank} called {made.signature.op} here before", made.location),
            (f"rank {waiting} waits here", missed.waiting.location),
        )
        return self.finding(
            severity=Severity.ERROR,
            ranks=(rank,),
            steps=missed.stand.steps,
            subjects=(now.signature.op if missed.usual and now else made.signature.op,),
            location=where,
            label=label,
            related=tuple(Related(label, spot) for label, spot in spots if spot and spot != where),
            summary=f"{summary}: {reported}",
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence={**evidence, "earlier_rounds": missed.rounds},
            at=at,
        )

    def _leaving(self, now: Snapshot, stands: list[RankSnapshot]) -> Finding:
        """Nobody communicates any more, and these processes do not end."""
        ranks = [s.rank.rank for s in stands]
        threads = {t for s in stands if s.stood and s.stood.joins_threads for t in s.stood.threads}
        waited = max(s.still_s for s in stands)
        return self.finding(
            ranks=tuple(ranks),
            confidence=Confidence.SUSPECTED,
            location=stands[0].location,
            label="the last that was seen of it",
            summary=f"{ranks_text(ranks)} left the process group and did not end in {waited:.0f} s",
            cause="the main thread is over, and Python waits for threads that are no daemons: "
            + ", ".join(sorted(threads))
            if threads
            else "the stacks say where it is",
            fix="end these threads before the program does, or make them with `daemon=True`"
            if threads
            else "compare source, destination and `tag=` of the messages at the lines in the stacks"
            if all(s.blocked for s in stands)
            else "look at the lines in the stacks",
            fix_kind=FixKind.CHECK,
            evidence={
                "waited_s": round(waited, 1),
                "hang_after_s": round(now.hang_after, 1),
                "stacks": merged_stacks(now),
            },
            at=now.at - waited,
        )

    def _still(self, now: Snapshot, stands: list[RankSnapshot]) -> Finding:
        waited = max((s.still_s for s in stands), default=0.0)
        calls = {(s.key, s.call.index, s.made.signature.op) for s in stands if s.call and s.made}
        unknown = _without_record(now, stands)
        together = len(calls) == 1 and all(s.blocked for s in stands)
        ranks = tuple(s.rank.rank for s in stands)
        reported = [s for s in stands if not s.unknown] or stands
        least = min(reported, key=lambda s: (s.rank.steps, s.rank.ring.count if s.rank.ring else 0))
        thread = thread_waits.failed(now, least)
        again = formed_again(stands) if together and not unknown else None
        return self.finding(
            ranks=ranks,
            confidence=Confidence.SUSPECTED,
            steps=least.steps,
            location=again or least.location,
            label="the group was formed here, again"
            if again
            else f"{_are(_with(stands, least))} here",
            related=(Related(f"{_are(_with(stands, least))} here", least.location),)
            if again and least.location
            else thread_waits.place(thread, least),
            summary=f"no rank{' on record' * bool(unknown)} has made progress for {waited:.0f} s: "
            + (f"all are {least.doing}" if together and not unknown else _doing(stands, least)),
            cause=CAUSE if again else _why(stands, together, unknown) + thread_waits.remark(thread),
            fix=FIX if again else _fix(stands, together, unknown),
            fix_kind=FixKind.CHECK,
            evidence={
                "waited_s": round(waited, 1),
                "hang_after_s": round(now.hang_after, 1),
                "stacks": merged_stacks(now),
                "flight_recorder": pending(now),
            },
            at=now.at - waited,
        )


def _alike(now: Snapshot, rings: Iterable[list[RankSnapshot]]) -> list[list[list[RankSnapshot]]]:
    """Rings, but for those over collectives of several groups; those that wait on the same lines
    are put together, unless a rank of theirs left a message out."""
    found: dict[object, list[list[RankSnapshot]]] = {}
    for ring in rings:
        lines = frozenset(s.location for s in ring)
        if not across_groups(ring):
            found.setdefault(lines if unsent(now, ring) is None else id(ring), []).append(ring)
    return list(found.values())


def _waits(ring: list[RankSnapshot]) -> tuple[Related, ...]:
    """The lines at which the others wait."""
    lines: dict[Location, list[int]] = {}
    for stand in ring:
        if stand.location is not None and stand.location != ring[0].location:
            lines.setdefault(stand.location, []).append(stand.rank.rank)
    return tuple(Related(f"{ranks_do(r, 'wait')} here", at) for at, r in list(lines.items())[:3])


def _without_record(now: Snapshot, stands: list[RankSnapshot]) -> list[int]:
    """Members of the groups they wait in whose calls are not on record."""
    members = {r for s in stands if s.blocked and s.key for r in s.key.ranks}
    known = {r for r, s in now.stands.items() if s.rank.started and not s.unknown}
    return sorted(members - known)


def _why(stands: list[RankSnapshot], together: bool, unknown: list[int]) -> str:
    if unknown:
        return (
            f"the calls of {ranks_text(unknown)} are not on record in this folder, so that whether "
            f"{'it' if len(unknown) == 1 else 'they'} came to that call is not known"
        )
    if together:
        nobody = "all ranks are in the same collective, so nobody is missing"
        if hook := _hook(stands):
            return (
                f"{nobody}: the communication hook {hook.name} averages in DDP's place, and what "
                "it began does not come to an end"
            )
        if _beside_each_other(stands):
            return f"{nobody}; why it does not come to an end is not on record"
        return f"{nobody}: the network or the devices do not deliver"
    if all(s.blocked for s in stands):
        return (
            "each waits for another one, and what they wait for was begun there: a message with "
            "another `tag=` than the one waited for, one that is under way, or one that is lost "
            "because nobody kept or waited for its handle"
        )
    waiting = [s for s in stands if s.blocked]
    if waiting:
        ranks = _with(waiting, waiting[0])
        what = f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {waiting[0].doing}"
        return f"{what}, where no rank is seen to be missing; the stacks say where each of them is"
    if all(s.location is not None and _STORE.search(s.location.source) for s in stands):
        return (
            "they may wait there for a key of a store that a rank has to set first, and that no "
            "rank did set: the stacks say where each of them is"
        )
    return "nobody waits for another rank; the stacks say where each of them is"


def _fix(stands: list[RankSnapshot], together: bool, unknown: list[int]) -> str:
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        return (
            f"see where {ranks_text(unknown)} {verb}; where each node has a folder of its own, "
            "`ddpdoctor report` takes them all"
        )
    if together:
        if _hook(stands):
            return (
                "try without the hook; one that waits for a collective in the callback of another "
                "one may keep the only thread that could end it"
            )
        if _beside_each_other(stands):
            return (
                "look at the lines in the stacks, and at threads or hooks that use the same group"
            )
        return "check the network between the nodes; on GPUs try NCCL_P2P_DISABLE=1"
    if all(s.blocked for s in stands):
        return "compare source, destination and `tag=` of the messages at the lines in the stacks"
    return "look at the lines in the stacks"


def _hook(stands: list[RankSnapshot]) -> CommHook | None:
    """The communication hook of the model in whose backward they all are."""
    for stand in stands:
        model = stand.made.signature.model if stand.made else -1
        hooks = [h for h in stand.rank.of(CommHook) if model in (h.model, -1)]
        if stand.made is None or stand.made.signature.op != "DDP backward" or not hooks:
            return None
    return hooks[0] if stands else None


def _beside_each_other(stands: list[RankSnapshot]) -> bool:
    """Whether they are on one machine and talk through its memory: no network, no GPU."""
    nodes = {s.rank.node for s in stands}
    return len(nodes) == 1 and not any(s.key is None or "nccl" in s.key.backend for s in stands)


def _doing(stands: list[RankSnapshot], least: RankSnapshot) -> str:
    """Where all are, if all wait; else the least progressed, and who is there with it."""
    rows: dict[str, list[int]] = {least.doing: _with(stands, least)}
    if all(s.blocked for s in stands):
        rows = {}
        for stand in stands:
            rows.setdefault(stand.doing, []).append(stand.rank.rank)
    return ", ".join(f"{_are(r)} {d}" for d, r in list(rows.items())[:4])


def _with(stands: list[RankSnapshot], one: RankSnapshot) -> list[int]:
    """The ranks that are where this one is."""
    return [s.rank.rank for s in stands if (s.doing, s.location) == (one.doing, one.location)]


def _are(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _wrong_peers(now: Snapshot, ring: list[RankSnapshot]) -> tuple[str, str] | None:
    """Cause and fix, where all exchange messages in one batch, and each receives from another rank
    than the one that sends to it."""
    sent: dict[int, list[int]] = {}
    for rank, stand in now.stands.items():
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
        f"no rank receives from the one that sends to it: rank {first} receives from "
        f"{ranks_text(takes)}, and {ranks_text(gives)} send{'s' if len(gives) == 1 else ''} to it",
        "check the peers of the receives: who sends to `(rank + 1) % world` receives from "
        "`(rank - 1) % world`",
    )


def _gone_on(collective: RankSnapshot, waiting: RankSnapshot) -> tuple[str, str]:
    """Cause and fix, where one rank is in a collective and another waits for a message of it, or
    for it to take one."""
    rank, other = collective.rank.rank, waiting.rank.rank
    op = waiting.made.signature.op if waiting.made else ""
    answer = {"send": "recv", "isend": "irecv", "recv": "send", "irecv": "isend"}.get(op, "")
    call = f"`dist.{answer}`" if answer else "call"
    place = collective.made.place if collective.made else "a collective"
    return (
        f"rank {rank} went on to {place} without the {call} that rank {other} waits for: it is "
        "missing there, or comes only afterwards",
        f"make the matching {call} on rank {rank} before that, or leave the message out on rank "
        f"{other}",
    )
