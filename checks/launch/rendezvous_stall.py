"""DDP102: ranks wait in `init_process_group` for others that do not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.left_early import gone_for_good, waits_for_all
from ddpdoctor.analysis.process.rank_claims import claims, set_at, unentered
from ddpdoctor.analysis.process.rendezvous import (
    expected_world,
    has_formed,
    has_no_store,
    last_line,
    left_early,
    port_set_at,
    same_store,
    stood_of,
    waiting_at,
)
from ddpdoctor.analysis.process.thresholds import SHORT_S
from ddpdoctor.analysis.waiting import stale_store
from ddpdoctor.analysis.waiting.rendezvous_words import WORDS
from ddpdoctor.events import GroupReady, InitEntered
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Related, Severity
from ddpdoctor.run import OF_DEVICES, Location, Rank, Run, counted, fold_ranks, ranks_do, ranks_text

TIMEOUTS = ("Timed out", "timed out", "timeout", "worker_count", "Connection", "recvValue")
"""What torch's errors contain when it gives up waiting for other ranks."""

_STARTS = "_new_process_group_helper"
"""torch's function that starts a backend, after the ranks have met in the store."""
_OWN = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
"""Addresses that lead to no other machine."""


class RendezvousStall(Check):
    """Some ranks never reach `init_process_group`

    ## What it finds
    Ranks that wait in `init_process_group` for ranks that do not arrive, because these are still
    busy before it, have exited, or do not exist (`world_size` is too large). The finding says which
    ranks arrived, which did not, and where these are.

    Also ranks that have all arrived but do not connect: each at an address of its own, at a
    `tcp://` address where nobody listens (under torchrun), or because a store still holds
    addresses of earlier ranks: after a restart, after the program has destroyed its process group
    and creates it again, or in a `file://` that an earlier run left behind.

    ## How it knows
    Each rank records when it enters `init_process_group` and when it has its group. The finding is
    made when a rank has waited there for the stall time (`--hang-after`; by default 30 s before
    training begins), or has raised a timeout or a lost connection. Stacks of the missing ranks,
    taken at that moment, show where they are.

    It is proven under `ddpdoctor run`

    - if `world_size` is larger than the number of processes
    - if all missing ranks are processes of a single node that exited with status 0, left no child
      processes and will not be restarted
    - if all ranks of a single node look for a store at an address of this machine that none of them
      opens
    - if the ranks of a single node wait at different ports

    A proven finding stops the run, unless `--on-hang report` or a short `timeout=` is set. Else it
    is suspected. If the program starts its ranks itself, only those are known that called
    `init_process_group`.

    ## Why it hurts
    `init_process_group` waits half an hour by default (ten minutes with NCCL). Then every rank that
    did arrive raises an error that does not name the missing ones.

    ## How to fix it
    Look at the line where the missing rank is. If `world_size` is wrong, omit `rank=` and
    `world_size=` and let torchrun set them.

    ## When it stays quiet
    - slow imports and downloads that end within the stall time
    """

    code = "DDP102"
    name = "rendezvous-stall"
    family = "launch"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "stale-store-after-restart": "torchrun's store still holds addresses of the last attempt",
        "stale-store-of-destroyed-group": "the store still holds addresses of a destroyed group",
        "stale-store-file": "the file of the store still holds addresses of an earlier run",
        "no-store-at-address": "under torchrun, no rank opens a store at the given address",
        "different-addresses": "ranks wait at different addresses for each other",
        "device-group-not-formed": "the ranks met, and the backend does not connect their devices",
        "address-unreachable": "all ranks wait at an address, but do not connect",
        "world-larger-than-launched": "the world size is above the number of launched processes",
        "processes-not-seen": "fewer processes were seen than the world size says",
        "rank-exited-before": "missing ranks exited before init_process_group",
        "rank-not-arrived": "missing ranks are still busy before init_process_group, or failed",
    }
    requires = (unentered,)
    effects = (
        Effect(("stall", "rank-missing")),
        Effect(("first-failure",), rules=("lost-peers",)),  # torch gave up waiting
        Effect(("first-failure",), of=("stale-store-after-restart",)),
        Effect(
            ("first-failure",), of=("stale-store-of-destroyed-group", "stale-store-file"),
            when=(When.WITHIN_RANKS,)
        ),
        Effect(
            ("first-failure",),
            of=("no-store-at-address", "different-addresses", "address-unreachable",
                "world-larger-than-launched",
                "processes-not-seen", "rank-exited-before", "rank-not-arrived"),
            when=(When.OTHER_RANKS,),
        ),
    )  # fmt: skip

    def examine(self, run: Run) -> Iterable[Finding]:
        waiting = [r for r in run.ranks.values() if _waits(r)]
        if run.stall is None:
            waiting = [r for r in waiting if not _given_up_since_a_stop(r)]
        if run.store_used_before and (met_nobody := _met_nobody(run, waiting)):
            yield self._after_restart(run, met_nobody)
            return
        left = stale_store.left_by_earlier_run(run)
        if left is not None and (met_nobody := _met_nobody(run, waiting)):
            yield self._file_left(met_nobody, left)
            return
        if again := _waiting_in_second_group(run):
            yield self._formed_again(again)
            return
        if not waiting or any(r.default_group for r in run.ranks.values()):
            return
        world = max(expected_world(r) for r in waiting)
        came = {r.rank for r in waiting}
        absent = [r for r in range(world) if r not in came]
        stalled, gave_up = run.stall is not None, [r for r in waiting if _gave_up(r)]
        if absent and (stalled or gave_up):
            yield self._report(run, waiting, absent, world)
        elif len(waiting) == len(run.ranks) and (stalled or gave_up) and waiting_at(waiting):
            yield self._at_different_addresses(run, waiting)
        elif stalled and len(waiting) == len(run.ranks):
            yield self._nobody_answers(run, waiting)

    def _after_restart(self, run: Run, waiting: list[Rank]) -> Finding:
        """The finding that ranks of a restarted run connect to addresses of the last attempt."""
        raised = waiting[0].exception
        return self._of_rule(
            "stale-store-after-restart",
            waiting,
            {"attempt": run.attempt - 1},
            evidence={
                "attempt": run.attempt,
                **_at_address(waiting),
                **({"message": raised.message[:500]} if raised and raised.message else {}),
            },
        )

    def _file_left(self, waiting: list[Rank], seconds: float) -> Finding:
        """The finding that ranks connect to addresses in a file that was written `seconds` before
        the run began."""
        return self._of_rule(
            "stale-store-file",
            waiting,
            {"seconds": f"{seconds:,.0f}"},
            evidence={**_at_address(waiting), "file written before the start, s": round(seconds)},
        )

    def _formed_again(self, waiting: list[Rank]) -> Finding:
        """The finding that ranks connect to addresses of a process group that was destroyed."""
        address, before = _at_address(waiting), len(waiting[0].of(InitEntered)) - 1
        return self._of_rule(
            "stale-store-of-destroyed-group",
            waiting,
            {"number": before + 1},
            evidence={
                "groups_before": before,
                "in_init_process_group": address["waiting"],
                "rendezvous": address["rendezvous"],
            },
        )

    def _at_different_addresses(self, run: Run, waiting: list[Rank]) -> Finding:
        """The finding that ranks wait for each other at addresses of their own."""
        places = waiting_at(waiting)
        first = waiting[0]
        chosen = port_set_at(first)
        entered = first.latest(InitEntered)
        here = first.location(entered.site) if entered else None
        one_node = len({r.node for r in waiting}) == 1
        stuck = one_node and _no_short_timeout(run, waiting)
        listed = "; ".join(f"{ranks_do(ranks, 'wait')} at {p}" for p, ranks in places.items())
        renamed = [c for c in claims(run) if c.process in waiting and c.differs()]
        also = "".join(
            f"; and rank {c.given_rank} of {c.given_world} waits as rank {c.rank} of {c.world_size}"
            for c in renamed[:1]
        )
        return self._of_rule(
            "different-addresses",
            waiting,
            {"listed": listed, "also": also},
            confidence=Confidence.PROVEN if one_node else Confidence.SUSPECTED,
            location=chosen or here,
            related=(
                *((Related("waits here", here),) if chosen and here else ()),
                *(set_at(renamed[0]) if renamed else ()),
            ),
            evidence={
                "waiting": ranks_text(r.rank for r in waiting),
                "rendezvous": [
                    {"ranks": fold_ranks(ranks), "address": p} for p, ranks in places.items()
                ],
            },
            deadlocked=stuck,
        )

    def _nobody_answers(self, run: Run, waiting: list[Rank]) -> Finding:
        """The finding that all ranks wait at one address and do not connect."""
        if backend := _starts_backend(run, waiting):
            at = _at_address(waiting)
            facts = {"backend": backend}
            return self._of_rule("device-group-not-formed", waiting, facts, evidence=at)
        alone = all(has_no_store(r) for r in waiting)
        never = alone and _never_opened(run, waiting)
        stuck = never and _no_short_timeout(run, waiting)
        return self._of_rule(
            "no-store-at-address" if alone else "address-unreachable",
            waiting,
            {},
            confidence=Confidence.PROVEN if never else Confidence.SUSPECTED,
            evidence={**_at_address(waiting), **({"stuck": stuck} if never else {})},
            deadlocked=stuck,
        )

    def _of_rule(
        self,
        rule: str,
        waiting: list[Rank],
        facts: Mapping[str, object],
        more: str = "",
        **fields: object,
    ) -> Finding:
        """A finding about ranks in `init_process_group`, by default all `waiting` ones. Its words
        are those of the rule, filled in with `facts`, with `more` at the end of the summary."""
        first, (label, summary, cause, fix) = waiting[0], WORDS[rule]
        entered = first.latest(InitEntered)
        ranks = tuple(r.rank for r in waiting)
        known = {
            "find": ranks_do(ranks, "find"),
            "ranks": fold_ranks(ranks),
            "place": entered.rendezvous if entered else "",
            **facts,
        }
        defaults = {
            "ranks": ranks,
            "confidence": Confidence.SUSPECTED,
            "location": first.location(entered.site) if entered else None,
            "summary": summary.format_map(known) + more,
            "at": first.wall(entered.at) if entered else 0.0,
        }
        return self.finding(
            rule=rule,
            subjects=("init_process_group",),
            label=label.format_map(known),
            cause=cause.format_map(known),
            fix=fix,
            fix_kind=FixKind.CHECK,
            **defaults | fields,
        )

    def _report(self, run: Run, waiting: list[Rank], absent: list[int], world: int) -> Finding:
        """The finding that ranks are missing in `init_process_group`.

        Args:
            waiting: the ranks that are there.
            absent: the missing ones, of which some may have left no record at all.
            world: the world size that `waiting` expect.
        """
        first = waiting[0]
        entered = first.latest(InitEntered)
        here = first.location(entered.site) if entered else None
        launched, seen = _launched(run, waiting), len(run.ranks)
        too_many = launched is not None and any(r >= launched for r in absent)
        late = [run.ranks[r] for r in absent if r in run.ranks]
        where = next((w for r in late if (w := last_line(run, r))), None)
        left = bool(late) and all(left_early(r) for r in late)
        # The state of missing ranks that left a record says more than any count.
        if not late and too_many:
            rule = "world-larger-than-launched"
        elif not late and launched is None:
            rule = "processes-not-seen"
        else:
            rule = "rank-exited-before" if left else "rank-not-arrived"
        exits = _exits_before(first, where) if left else []
        where = exits[0] if len(exits) == 1 else where
        # Only `ddpdoctor run` is known to have started all its processes already.
        all_started = run.info.launcher == "run"
        wrong_size = rule == "world-larger-than-launched"
        gone = (
            left
            and len(late) == len(absent)
            and all(gone_for_good(run, r) for r in late)
            and all(waits_for_all(c) for c in claims(run) if c.process in waiting)
        )
        stuck = gone and _no_short_timeout(run, waiting)
        waits = ranks_do((r.rank for r in waiting), "wait")
        facts = {
            "waits": waits,
            "world": world,
            "exist": counted(launched or 0, "process exists", "processes exist"),
            "launched": counted(launched or 0, "process was", "processes were"),
            "seen": counted(seen, "process was", "processes were"),
            "do_not_reach": f"{ranks_text(absent)} "
            + ("does not reach" if len(absent) == 1 else "do not reach"),
            "left": "may have left here"
            if len(exits) == 1
            else "left here"
            if where
            else "not in init_process_group",
        }
        return self._of_rule(
            rule,
            waiting,
            facts,
            ranks=tuple(r.rank for r in waiting) if wrong_size else tuple(absent),
            confidence=Confidence.PROVEN
            if gone or (wrong_size and all_started)
            else Confidence.SUSPECTED,
            location=here if wrong_size else where or here,
            related=(
                *(Related("may have left here", way) for way in exits[:3] if way != where),
                *((Related(f"{waits} here", here),) if here and where else ()),
            ),
            more=("" if all_started or not wrong_size else " so far")
            + (f"; rank {late[0].rank} {_state(run, late[0])}" if late else ""),
            evidence={
                "waiting": ranks_text(r.rank for r in waiting),
                "missing": ranks_text(absent),
                "world_size_expected": world,
                **(
                    {"processes_seen": seen}
                    if launched is None
                    else {"processes_launched": launched}
                ),
                "missing_ranks": [{"rank": r.rank, "state": _state(run, r)} for r in late],
                **({"stuck": stuck} if gone else {}),
            },
            deadlocked=stuck,
            at=first.wall(entered.at) if entered else run.started,
        )


def _at_address(waiting: list[Rank]) -> dict[str, object]:
    """Who waits where, as evidence."""
    entered = waiting[0].latest(InitEntered)
    return {
        "waiting": ranks_text(r.rank for r in waiting),
        "rendezvous": entered.rendezvous if entered else "",
    }


def _launched(run: Run, waiting: list[Rank]) -> int | None:
    """How many processes were launched; None if that is not known, because a program that starts
    its ranks itself tells no more than the world size it expects."""
    reported = any("WORLD_SIZE" in r.started.environment for r in waiting if r.started)
    if run.info.launcher != "run" and not reported and run.info.world_size > len(run.ranks):
        return None
    return max(len(run.ranks), run.info.world_size)


def _waits(rank: Rank) -> bool:
    """Whether a rank entered `init_process_group` and did not get its group."""
    return bool(rank.of(InitEntered)) and not rank.of(GroupReady)


def _met_nobody(run: Run, waiting: list[Rank]) -> list[Rank]:
    """Ranks that gave up connecting to others; if none did, all ranks, provided that all wait."""
    refused = [r for r in waiting if _gave_up(r)]
    return refused or (waiting if run.stall is not None and len(waiting) == len(run.ranks) else [])


def _waiting_in_second_group(run: Run) -> list[Rank]:
    """Ranks that call `init_process_group` for the second time (or later) and get no group, though
    all ranks called it and it uses the same store as the group before; empty otherwise."""
    entered = [r.of(InitEntered) for r in run.ranks.values()]
    if {len(e) for e in entered} <= {0, 1} or len({len(e) for e in entered}) > 1:
        return []
    if any(not same_store(r) for r in run.ranks.values()):
        return []
    waiting = [r for r in run.ranks.values() if not has_formed(r)]
    raised = [r for r in waiting if r.exception is not None]
    if not all(map(_gave_up, raised)):
        return []
    return waiting if run.stall is not None or raised else []


def _never_opened(run: Run, waiting: list[Rank]) -> bool:
    """Whether it is certain that no process will open the store: torchrun on a single node has
    started no other rank, the address belongs to this machine, and the stack of every rank is where
    torch connects to the store."""
    places = [e.rendezvous for r in waiting if (e := r.latest(InitEntered))]
    looks = [s for r in waiting if (s := stood_of(run, r)) and s.frames]
    return (
        run.info.launcher == "run"
        and run.info.nodes <= 1
        and len(waiting) == run.world_size == len(looks)
        and all(place.startswith(_OWN) for place in places)
        and all(any(f.function == "_create_c10d_store" for f in s.frames) for s in looks)
    )


def _starts_backend(run: Run, waiting: list[Rank]) -> str:
    """The backend that connects devices inside of `init_process_group`, where the stack of every
    rank is; empty where one is elsewhere, or no stack says."""
    looks = [s for r in waiting if (s := stood_of(run, r)) and s.frames]
    entered = waiting[0].latest(InitEntered)
    inside = all(any(f.function == _STARTS for f in s.frames) for s in looks)
    of_devices = entered is not None and any(name in entered.backend for name in OF_DEVICES)
    if entered is None or not (inside and of_devices) or len(looks) < len(waiting):
        return ""
    return entered.backend


def _no_short_timeout(run: Run, waiting: list[Rank]) -> bool:
    """Whether the run stalls and no rank has a short `timeout=`, by which it would soon go on."""
    asked = (e.timeout_s for r in waiting for e in r.of(InitEntered))
    return run.stall is not None and not any(0 <= timeout < SHORT_S for timeout in asked)


def _gave_up(rank: Rank) -> bool:
    """Whether a rank raised torch's error about a timeout or a lost connection."""
    raised = rank.exception
    return raised is not None and any(word in raised.message for word in TIMEOUTS)


def _given_up_since_a_stop(rank: Rank) -> bool:
    """Whether a rank lost the others after the user had stopped the run, on any node."""
    raised, stop = rank.exception, rank.stopped
    return _gave_up(rank) and bool(raised and stop and stop.by != "doctor" and stop.at <= raised.at)


def _exits_before(came: Rank, left: Location | None) -> list[Location]:
    """The conditional `return`s and exits on the way to the `init_process_group` of the rank `came`
    by one of which another rank may have left. `left`: the line at which that one ended, if known:
    then only exits of functions that this line calls (`sys.exit(main())`)."""
    entered = came.latest(InitEntered)
    found = [came.location(site) for site in entered.past] if entered else []
    return [p for p in found if p and (left is None or f"{p.function}(" in left.source)]


def _is_over(rank: Rank) -> bool:
    """Whether a rank's process was seen to end, not ended by the launcher."""
    ended, reported = rank.ended, rank.stopped
    return (
        ended is not None and not ended.by_launcher and (reported is None or ended.at < reported.at)
    )


def _state(run: Run, rank: Rank) -> str:
    """What a missing rank does, as a verb phrase: `has exited (return)`, `is at train.py:3`."""
    if leaving := left_early(rank):
        where = rank.location(leaving.site)
        return f"has exited ({leaving.how}{f' at {where}' if where else ''})"
    if _is_over(rank):
        how = rank.signal or f"status {rank.exit_code}"
        return f"has ended ({how})"
    where = last_line(run, rank)
    if where is not None:
        text = f" `{where.source.strip()}`" if where.source.strip() else ""
        return f"is at {where}{text}"
    return "is somewhere before it"
