"""DDP609."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.control_flow.early_returns import early_return_to
from ddpdoctor.analysis.control_flow.jumps import ways_around
from ddpdoctor.analysis.divergence.early_return import not_skipped
from ddpdoctor.analysis.divergence.early_return import related as ways_of
from ddpdoctor.analysis.divergence.missing_calls import Unsent, unsent
from ddpdoctor.analysis.waiting import failed_threads
from ddpdoctor.analysis.waiting.device_waits import hosts_ahead
from ddpdoctor.analysis.waiting.message_cycles import (
    gone_on,
    in_a_cycle,
    met_without,
    wrong_peers,
)
from ddpdoctor.analysis.waiting.snapshot import (
    RankSnapshot,
    Snapshot,
    snapshot_of,
)
from ddpdoctor.analysis.waiting.standstill_reasons import reason_for
from ddpdoctor.analysis.waiting.wait_graph import (
    across_groups,
    cycles,
    gone,
    in_init,
    merged_stacks,
    missing,
    pairs,
    path,
    pending,
    victims,
    wait_lines,
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
from ddpdoctor.run import Location, Run, counted, ranks_do, ranks_text

COMPARE_MESSAGES = (
    "compare source, destination and `tag=` of the messages at the lines in the stacks"
)
_STORE = re.compile(r"store\w*(?:\(\))?\.(?:get|wait)\(", re.IGNORECASE)
"""Calls that wait until another rank has set a key of the store."""


class Stall(Check):
    """No rank makes progress

    ## What it finds
    A run that stands still without a rank that the others wait for: all ranks are in the same
    collective (the network, or the devices), all are in their own code, they wait for each other in
    a cycle (`recv` on both sides), or they left the group and do not exit (a non-daemon thread).
    Stacks are merged: equal ones are shown once, the rank with the least progress first.

    ## How it knows
    Each rank records every call before it makes it, and where it is in its step. A cycle shows in
    what the ranks have begun to send, to receive and to call: each waits for what the next one has
    not begun. That is proven, and an error. Otherwise the run must have stood still for the stall
    time (see `rank-missing`) without a rank that the others wait for: the node's monitor then takes
    the stacks, and the finding is suspected.

    ## Why it hurts
    The job occupies its machines and does nothing.

    ## How to fix it
    A cycle: let one side send first, or use `batch_isend_irecv`; a rank that skipped a message that
    it sent in every earlier round, or waits for one more than before, is named with its line. All
    in one collective: look at the network and, on GPUs, at peer-to-peer access (try
    `NCCL_P2P_DISABLE=1`); a group that was formed again over the store of an earlier one is
    reported as such. Otherwise the stacks show where the program is.

    ## When it stays quiet
    - Pauses for evaluation and checkpoints: the stall time is learned from the run.
    """

    code = "DDP609"
    name = "stall"
    family = "hang"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "cycle": "ranks wait for each other's messages in a cycle",
        "wrong-peers": "each rank receives from another one than the one that sends to it",
        "message-after-collective": "a rank is in a collective while another awaits its message",
        "missing-message": "a rank skipped a message that it exchanged in every earlier round",
        "extra-message": "a rank repeats a message call more often than in earlier rounds",
        "not-exiting": "ranks left the process group and do not exit",
        "group-formed-again": "the group was formed again over the store of an earlier one",
        "missing-record": "the calls of some members of the group are not on record",
        "same-collective": "all ranks are in the same collective",
        "first-collective": "all ranks are in a group's first collective, which connects devices",
        "importing": "a rank is importing modules, and the others wait for it",
        "skipped-collective": "a rank went on to a message without the collective of the others",
        "unwaited-send": "ranks wait for messages that others sent and did not wait for",
        "different-on-device": "the ranks' devices are in different collectives, below equal calls",
        "several-threads": "all ranks are in the same collective, and threads share its group",
        "waiting-messages": "all ranks wait, each for another one",
        "own-code": "not all ranks wait in communication, and no rank is known to be missing",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        now = snapshot_of(run)
        rings = cycles(now)
        ring = rings[0] if rings else []
        if ring and across_groups([now.by_rank[r] for r in ring]):
            return  # reported by collective-mismatch
        if ring:
            for first, *others in _by_lines(now, [[now.by_rank[r] for r in one] for one in rings]):
                yield self._ring(now, first, others)
        elif now.stall is not None and not missing(now) and not gone(now) and not in_init(now):
            known = [s for s in now.by_rank.values() if s.rank.started]
            stands = [s for s in known if not s.gone]
            left = [s for s in known if s.stood and s.stood.at >= now.stall.at]
            if stands:
                yield self._still(now, stands)
            elif left:
                yield self._leaving(now, left)

    def _ring(
        self, now: Snapshot, ring: list[RankSnapshot], others: list[list[RankSnapshot]]
    ) -> Finding:
        """Ranks that wait for each other in a cycle; `others` wait likewise, on the same lines."""
        first, more = ring[0], [s for other in others for s in other]
        waits = ", ".join(
            f"rank {s.rank.rank} waits {s.doing} for rank {o.rank.rank}" for s, o in pairs(ring)
        )
        waits = f"ranks are deadlocked, waiting for each other: {waits}"
        if more:
            same = ranks_text(sorted(s.rank.rank for s in more))
            waits += f"; {same} likewise, on the same lines"
        evidence: Evidence = {
            "cycle": path(ring),
            **victims(now, [*ring, *more]),
            "stacks": merged_stacks(now),
        }
        at = now.at - max(s.still_s for s in (*ring, *more))
        if missed := unsent(now, ring):
            return self._unsent(missed, waits, evidence, at, deadlocked=not now.failed)
        rule = "cycle"
        cause = in_a_cycle(ring)
        fix = (
            "let one side send first and the other receive first, or send with `work = "
            "dist.isend(...)` and call `work.wait()` after the receive (`dist.batch_isend_irecv`); "
            "if the order is right, let every rank receive as many messages as the other one sends"
        )
        on = next((i for i, s in enumerate(ring) if s.call is not None and s.call.peer < 0), None)
        if on is not None and (met := met_without(now, ring[on], ring[on - 1])):
            return self._skipped(now, met, ring[on - 1], waits, evidence, at)
        if wrong := wrong_peers(now, ring):
            rule, (cause, fix) = "wrong-peers", wrong
        elif on is not None:
            rule, (cause, fix) = "message-after-collective", gone_on(ring[on], ring[on - 1])
        return self.finding(
            rule=rule,
            deadlocked=not now.failed,
            severity=Severity.ERROR,
            ranks=tuple(sorted(s.rank.rank for s in (*ring, *more))),
            steps=first.steps,
            location=first.location,
            label=f"rank {first.rank.rank} waits here",
            related=wait_lines(ring, first.location),
            summary=waits,
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence=evidence,
            at=at,
        )

    def _skipped(
        self,
        now: Snapshot,
        met: list[RankSnapshot],
        absent: RankSnapshot,
        waits: str,
        evidence: Evidence,
        at: float,
    ) -> Finding:
        """All other members of a group are in a collective, which one rank went past."""
        rank, made = absent.rank.rank, met[0].made
        assert made is not None
        back = early_return_to(made, absent.made) if absent.made else None
        others = ranks_text([s.rank.rank for s in met])
        how = f"came back from `{back.function}` without it: {back.text}" if back else "did not"
        where = met[0].location
        return self.finding(
            rule="skipped-collective",
            deadlocked=not now.failed,
            severity=Severity.ERROR,
            ranks=(rank,),
            steps=absent.steps,
            subjects=(made.signature.op,),
            location=where,
            label=f"skipped by rank {rank}",
            related=(
                *(ways_of(back, [rank]) if back else ()),
                *wait_lines([absent], where),
            ),
            summary=f"rank {rank} went on without {made.place}, in which {others} are: {waits}",
            cause=f"{others} reached {made.place}, which all ranks of {met[0].key} have to call; "
            f"rank {rank} {how}",
            fix=not_skipped(back, made)
            if back
            else f"call {made.signature.op} on rank {rank} as well, or create a group of the ranks "
            "that call it",
            fix_kind=FixKind.CHECK,
            evidence=evidence,
            at=at,
        )

    def _unsent(
        self, missed: Unsent, waits: str, evidence: Evidence, at: float, *, deadlocked: bool
    ) -> Finding:
        """In all earlier rounds the order was right; in this one a rank skipped its call, or
        repeated the one before."""
        rank, waiting = missed.stand.rank.rank, missed.waiting.rank.rank
        made, now = missed.made, missed.stand.made
        ways = ways_around(made, ends=missed.ended)
        rule = "missing-message"
        where = ways[0] if len(ways) == 1 else made.location
        label = f"rank {rank} skipped its {made.signature.op}"
        summary = f"rank {rank} skipped {made.place}, for which rank {waiting} waits"
        cause = (
            f"rank {rank} made that call in each of its last {missed.rounds} rounds, but not in "
            "this one"
        )
        fix = f"make the call in every round, or skip it on rank {waiting} as well"
        if missed.usual and now is not None:
            rule = "extra-message"
            where, label = now.location, f"rank {rank} made this call once more"
            summary = f"rank {rank} calls {now.place} once more than in its earlier rounds"
            cause = (
                f"in each of its last {missed.rounds} rounds rank {rank} made that call "
                f"{counted(missed.usual, 'time')} in a row and then {made.place}, for which rank "
                f"{waiting} waits; in this round it made it {missed.usual + 1} times"
            )
            fix = (
                f"let ranks {rank} and {waiting} exchange the same number of messages in every "
                "round: compute it from values that are equal on both"
            )
        spots = (
            *((f"may have led rank {rank} around the call", w) for w in ways[:2] if missed.ended),
            (f"rank {rank} called {made.signature.op} here before", made.location),
            (f"rank {waiting} waits here", missed.waiting.location),
        )
        return self.finding(
            rule=rule,
            deadlocked=deadlocked,
            severity=Severity.ERROR,
            ranks=(rank,),
            steps=missed.stand.steps,
            subjects=(now.signature.op if missed.usual and now else made.signature.op,),
            location=where,
            label=label,
            related=tuple(Related(label, spot) for label, spot in spots if spot and spot != where),
            summary=f"{summary}: {waits}",
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence={**evidence, "earlier_rounds": missed.rounds},
            at=at,
        )

    def _leaving(self, now: Snapshot, stands: list[RankSnapshot]) -> Finding:
        """No rank communicates any more, and these processes do not exit."""
        ranks = [s.rank.rank for s in stands]
        threads = {t for s in stands if s.stood and s.stood.joins_threads for t in s.stood.threads}
        waited = max(s.still_s for s in stands)
        fix = "look at the lines in the stacks"
        cause = "the stacks show where the process is"
        where, label = stands[0].location, "last seen here"
        at_exit = [s for s in stands if s.stood and s.stood.outermost_of_user]
        if threads:
            cause = "the main thread has finished, and Python waits for non-daemon threads: "
            cause += ", ".join(sorted(threads))
            joined = next(s for s in stands if s.stood and s.stood.joins_threads)
            where, label = _thread_line(joined) or where, "this thread has not ended"
            fix = "join these threads before exit, or create them with `daemon=True`"
        elif all(s.blocked for s in stands):
            fix = COMPARE_MESSAGES
        elif at_exit and (called := at_exit[0].stood and at_exit[0].stood.outermost_of_user):
            where, label = at_exit[0].location, "does not return"
            cause = (
                f"the program has ended, and {called.function}, which Python calls at exit (an "
                "`atexit` handler or a destructor), does not return"
            )
            fix = "add a limit to the waiting there, or call it before the program ends"
        return self.finding(
            rule="not-exiting",
            ranks=tuple(ranks),
            confidence=Confidence.SUSPECTED,
            location=where,
            label=label,
            summary=f"{ranks_text(ranks)} left the process group but did not exit within "
            f"{waited:.0f} s",
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence={**_times(now, waited), "stacks": merged_stacks(now)},
            at=now.at - waited,
        )

    def _still(self, now: Snapshot, stands: list[RankSnapshot]) -> Finding:
        waited = max((s.still_s for s in stands), default=0.0)
        how_long = f" for {waited:.0f} s" if now.timed else ""
        unknown = _without_record(now, stands)
        seen = [s for s in stands if not s.unknown] or stands
        least = min(seen, key=lambda s: (s.rank.steps, s.rank.ring.count if s.rank.ring else 0))
        thread = failed_threads.failed_thread(now, least)
        rule = _rule(stands, unknown)
        here = f"{_are(_with(stands, least))} here"
        together = rule == "same-collective"
        told = reason_for(now, stands, least, rule)
        spot = told.line if told and told.label else least.location
        return self.finding(
            rule=told.rule if told else rule,
            ranks=(told and told.ranks) or tuple(s.rank.rank for s in stands),
            confidence=Confidence.PROVEN if told and told.proven else Confidence.SUSPECTED,
            severity=Severity.ERROR if told and told.proven else Severity.WARNING,
            deadlocked=bool(told and told.proven and not now.failed),
            steps=least.steps,
            location=spot,
            label=told.label if told and told.label else here,
            related=(Related(here, least.location),)
            if told and told.label and least.location
            else failed_threads.failed_thread_line(thread, least),
            summary=f"no rank{' on record' * bool(unknown)} has made progress{how_long}: "
            + (f"all are {least.doing}" if together else _doing(stands, least)),
            cause=told.cause
            if told
            else _why(now, rule, stands, unknown) + failed_threads.failed_thread_remark(thread),
            fix=told.fix if told else _fix(rule, stands, unknown),
            fix_kind=FixKind.CHECK,
            evidence={
                **_times(now, waited),
                "stacks": merged_stacks(now),
                "flight_recorder": pending(now),
            },
            at=now.at - waited,
        )


def _times(now: Snapshot, waited: float) -> Evidence:
    times = {"waited_s": round(waited, 1), "hang_after_s": round(now.hang_after, 1)}
    return {**times} if now.timed else {}


def _thread_line(stand: RankSnapshot) -> Location | None:
    """The user's line at which one of a rank's other threads is."""
    frames = stand.stood.thread_frames if stand.stood else ()
    return stand.rank.frame_location(frames[0]) if frames else None


def _rule(stands: list[RankSnapshot], unknown: list[int]) -> str:
    """Why ranks stand still; without the records of all members the rest says nothing."""
    if unknown:
        return "missing-record"
    if _together(stands):
        return "same-collective"
    return "waiting-messages" if all(s.blocked for s in stands) else "own-code"


def _together(stands: list[RankSnapshot]) -> bool:
    """Whether all ranks wait in the same call of the same group."""
    calls = {(s.key, s.call.index, s.made.signature.op) for s in stands if s.call and s.made}
    collective = all(s.call is not None and s.call.index >= 0 for s in stands)
    return collective and len(calls) == 1 and all(s.blocked for s in stands)


def _by_lines(now: Snapshot, rings: Iterable[list[RankSnapshot]]) -> list[list[list[RankSnapshot]]]:
    """Cycles that wait on the same lines, put together, unless one of their ranks skipped a
    message; without those over collectives of several groups, which are no fault of messages."""
    found: dict[object, list[list[RankSnapshot]]] = {}
    for ring in rings:
        lines = frozenset(s.location for s in ring)
        if not across_groups(ring):
            found.setdefault(lines if unsent(now, ring) is None else id(ring), []).append(ring)
    return list(found.values())


def _without_record(now: Snapshot, stands: list[RankSnapshot]) -> list[int]:
    """Members of the groups in which ranks wait, but whose calls are not on record."""
    members = {r for s in stands if s.blocked and s.key for r in s.key.ranks}
    known = {r for r, s in now.by_rank.items() if s.rank.started and not s.unknown}
    return sorted(members - known)


def _why(now: Snapshot, rule: str, stands: list[RankSnapshot], unknown: list[int]) -> str:
    match rule:
        case "missing-record":
            they = "it" if len(unknown) == 1 else "they"
            return (
                f"the calls of {ranks_text(unknown)} are not on record in this folder, so it is "
                f"not known whether {they} reached that call"
            )
        case "same-collective":
            nobody = "all ranks are in the same collective, so no rank is missing"
            if hook := _hook(stands):
                return (
                    f"{nobody}: the communication hook {hook.name} averages in place of DDP, and "
                    "the communication that it started does not complete"
                )
            if _on_one_machine(stands):
                return f"{nobody}; why it does not complete is not on record"
            return f"{nobody}: the network or the devices do not deliver"
        case "waiting-messages":
            return (
                "each rank waits for another one that has begun the matching call: a message with "
                "a different `tag=`, one that is in flight, or one that is lost because its handle "
                "was not kept or waited for"
            )
    waiting = [s for s in stands if s.blocked]
    if waiting:
        ranks = _with(waiting, waiting[0])
        return (
            f"{ranks_do(ranks, 'wait')} {waiting[0].doing}, where no rank is seen to be missing; "
            "the stacks show where each rank is"
        )
    if all(s.location is not None and _STORE.search(s.location.source) for s in stands):
        return (
            "they may wait there for a store key that another rank has to set first and never set: "
            "the stacks show where each rank is"
        )
    if ahead := hosts_ahead(now.known):
        return f"{ahead}; the stacks show where each rank is"
    return "no rank waits for another one; the stacks show where each rank is"


def _fix(rule: str, stands: list[RankSnapshot], unknown: list[int]) -> str:
    match rule:
        case "missing-record":
            verb = "is" if len(unknown) == 1 else "are"
            return (
                f"see where {ranks_text(unknown)} {verb}; if each node has a folder of its own, "
                "pass all of them to `ddpdoctor report`"
            )
        case "same-collective" if _hook(stands):
            return (
                "try without the hook; a hook that waits for a collective in the callback of "
                "another one may block the only thread that could complete it"
            )
        case "same-collective" if _on_one_machine(stands):
            return (
                "look at the lines in the stacks, and at threads or hooks that use the same group"
            )
        case "same-collective":
            return "check the network between the nodes; on GPUs try NCCL_P2P_DISABLE=1"
        case "waiting-messages":
            return COMPARE_MESSAGES
    return "look at the lines in the stacks"


def _hook(stands: list[RankSnapshot]) -> CommHook | None:
    """The communication hook of the model in whose backward all ranks are; None for none."""
    for stand in stands:
        model = stand.made.signature.model if stand.made else -1
        hooks = [h for h in stand.rank.of(CommHook) if model in (h.model, -1)]
        if stand.made is None or stand.made.signature.op != "DDP backward" or not hooks:
            return None
    return hooks[0] if stands else None


def _on_one_machine(stands: list[RankSnapshot]) -> bool:
    """Whether all ranks are on one machine and use neither a network nor GPUs to communicate."""
    nodes = {s.rank.node for s in stands}
    return len(nodes) == 1 and not any(s.key is None or "nccl" in s.key.backend for s in stands)


def _doing(stands: list[RankSnapshot], least: RankSnapshot) -> str:
    """Where all ranks are, if all wait; otherwise the rank with the least progress, and who is at
    the same place."""
    rows: dict[str, list[int]] = {least.doing: _with(stands, least)}
    if all(s.blocked for s in stands):
        rows = {}
        for stand in stands:
            rows.setdefault(stand.doing, []).append(stand.rank.rank)
    return ", ".join(f"{_are(r)} {d}" for d, r in list(rows.items())[:4])


def _with(stands: list[RankSnapshot], one: RankSnapshot) -> list[int]:
    """The ranks that are where `one` is, itself included."""
    return [s.rank.rank for s in stands if (s.doing, s.location) == (one.doing, one.location)]


def _are(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'}"
