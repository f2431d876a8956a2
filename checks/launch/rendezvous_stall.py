"""DDP102: ranks wait in `init_process_group` for others that do not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.left_early import SHORT_S, gone_for_good, waits_for_all
from ddpdoctor.analysis.process.rank_claims import claims, unentered
from ddpdoctor.events import GroupReady, InitEntered, RankExiting, RankStood
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, counted, fold_ranks, ranks_do, ranks_text, shorten

TIMEOUTS = ("Timed out", "timed out", "timeout", "worker_count", "Connection", "recvValue")
"""What torch's errors contain when it gives up waiting for other ranks."""

_OWN = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
"""Addresses that lead to no other machine."""


class RendezvousStall(Check):
    """Some ranks never reach `init_process_group`

    ## What it finds
    Ranks that wait in `init_process_group` for ranks that do not arrive, because these are still
    busy before it, have exited, or do not exist (`world_size` is too large). The finding says which
    ranks arrived, which did not, and where these are.

    Also ranks that have all arrived but do not connect: at a `tcp://` address where nobody listens
    (under torchrun), or because a store still holds addresses of earlier ranks, after a restart or
    after the program has destroyed its process group and creates it again.

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
        "no-store-at-address": "under torchrun, no rank opens a store at the given address",
        "address-unreachable": "all ranks wait at an address, but do not connect",
        "world-larger-than-launched": "the world size is above the number of launched processes",
        "processes-not-seen": "fewer processes were seen than the world size says",
        "rank-exited-before": "missing ranks exited before init_process_group",
        "rank-not-arrived": "missing ranks are still busy before init_process_group, or failed",
    }
    requires = (unentered,)
    effects = (
        Effect(("stall", "rank-missing")),
        # torch gave up waiting
        Effect(("first-failure",), rules=("lost-peers",)),
        Effect(("first-failure",), of=("stale-store-after-restart",)),
        Effect(
            ("first-failure",), of=("stale-store-of-destroyed-group",), when=(When.WITHIN_RANKS,)
        ),
        Effect(
            ("first-failure",),
            of=("no-store-at-address", "address-unreachable", "world-larger-than-launched",
                "processes-not-seen", "rank-exited-before", "rank-not-arrived"),
            when=(When.OTHER_RANKS,),
        ),
    )  # fmt: skip

    def examine(self, run: Run) -> Iterable[Finding]:
        waiting = [r for r in run.ranks.values() if _waits(r)]
        if run.store_used_before and (met_nobody := _met_nobody(run, waiting)):
            yield self._after_restart(run, met_nobody)
            return
        if again := _waiting_in_second_group(run):
            yield self._formed_again(run, again)
            return
        if not waiting or any(r.default_group for r in run.ranks.values()):
            return
        world = max(expected_world(r) for r in waiting)
        came = {r.rank for r in waiting}
        absent = [r for r in range(world) if r not in came]
        stalled, gave_up = run.stall is not None, [r for r in waiting if _gave_up(r)]
        if absent and (stalled or gave_up):
            yield self._report(run, waiting, absent, world)
        elif stalled and len(waiting) == len(run.ranks):
            yield self._nobody_answers(run, waiting)

    def _after_restart(self, run: Run, waiting: list[Rank]) -> Finding:
        """The finding that ranks of a restarted run connect to addresses of the last attempt."""
        first = waiting[0]
        entered = first.latest(InitEntered)
        ranks = [r.rank for r in waiting]
        raised = first.exception.message if first.exception else ""
        return self.finding(
            rule="stale-store-after-restart",
            ranks=tuple(ranks),
            confidence=Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=first.location(entered.site) if entered else None,
            label="connects to ranks of the last attempt",
            summary=f"after the restart {ranks_do(ranks, 'find')} no other rank in "
            "init_process_group",
            cause="torchrun's store survives the restart and still holds the addresses of attempt "
            f"{run.attempt - 1}; gloo may connect to them before they are overwritten, so "
            "restarts fail at random",
            fix="set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment, with "
            "`--standalone` or `--rdzv-backend=c10d`: each attempt then creates a new store",
            fix_kind=FixKind.CHECK,
            evidence={
                "attempt": run.attempt,
                "waiting": ranks_text(ranks),
                "rendezvous": entered.rendezvous if entered else "",
                **({"message": raised[:500]} if raised else {}),
            },
            at=first.wall(entered.at) if entered else 0.0,
        )

    def _formed_again(self, run: Run, waiting: list[Rank]) -> Finding:
        """The finding that ranks connect to addresses of a process group that was destroyed."""
        first = waiting[0]
        *before, entered = first.of(InitEntered)
        ranks = [r.rank for r in waiting]
        return self.finding(
            rule="stale-store-of-destroyed-group",
            ranks=tuple(ranks),
            confidence=Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=first.location(entered.site),
            label=f"uses the store at {entered.rendezvous} again",
            summary=f"{ranks_do(ranks, 'find')} no other rank in init_process_group call "
            f"{len(before) + 1}, although all ranks made that call",
            cause="the store still holds the addresses of the destroyed process group; the backend "
            "may connect to them before they are overwritten, so a new group fails at random",
            fix="create the process group once and destroy it at the end; or give each group its "
            'own prefix in the store: `init_process_group(backend, store=dist.PrefixStore(f"group '
            '{n}", store), rank=rank, world_size=world_size)`',
            fix_kind=FixKind.CHECK,
            evidence={
                "groups_before": len(before),
                "in_init_process_group": ranks_text(ranks),
                "rendezvous": entered.rendezvous,
            },
            at=first.wall(entered.at),
        )

    def _nobody_answers(self, run: Run, waiting: list[Rank]) -> Finding:
        """The finding that all ranks wait at one address and do not connect."""
        first = waiting[0]
        entered = first.latest(InitEntered)
        place = entered.rendezvous if entered else ""
        ranks = [r.rank for r in waiting]
        alone = all(_no_store(r) for r in waiting)
        never = alone and _never_opened(run, waiting)
        return self.finding(
            rule="no-store-at-address" if alone else "address-unreachable",
            ranks=tuple(ranks),
            confidence=Confidence.PROVEN if never else Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=first.location(entered.site) if entered else None,
            label=f"rendezvous at {place}",
            summary=f"all ranks ({fold_ranks(ranks)}) wait in init_process_group at {place}, but "
            "do not connect",
            cause="nobody listens at this address: under torchrun no rank opens a store, and "
            "torchrun's own store is at MASTER_ADDR and MASTER_PORT"
            if alone
            else "rank 0 cannot be reached at this address, or something else listens there",
            fix="omit `init_method=`, or pass `env://`: torchrun has set the address"
            if alone
            else "check the address, that the port is free on rank 0's machine, and that the other "
            "machines can reach it",
            fix_kind=FixKind.CHECK,
            evidence={
                "waiting": ranks_text(ranks),
                "rendezvous": place,
                **({"stuck": _no_short_timeout(run, waiting)} if never else {}),
            },
            deadlocked=never and _no_short_timeout(run, waiting),
            at=first.wall(entered.at) if entered else 0.0,
        )

    def _report(
        self,
        run: Run,
        waiting: list[Rank],
        absent: list[int],
        world: int,
    ) -> Finding:
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
        too_many = [r for r in absent if launched is not None and r >= launched]
        late = [run.ranks[r] for r in absent if r in run.ranks]
        where = next((w for r in late if (w := _where(run, r))), None)
        left = bool(late) and all(_left(r) for r in late)
        rule = _rule_for_missing(bool(late), left, bool(too_many), launched)
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
        label, cause, fix = _WORDS[rule]
        if rule == "rank-exited-before":
            label = "left here" if where else "not in init_process_group"
            label = "may have left here" if len(exits) == 1 else label
        count, done = (launched or 0, "launched") if wrong_size else (seen, "seen")
        known = f"{counted(count, 'process was', 'processes were')} {done}"
        waits = ranks_do((r.rank for r in waiting), "wait")
        return self.finding(
            rule=rule,
            ranks=tuple(r.rank for r in waiting) if wrong_size else tuple(absent),
            confidence=Confidence.PROVEN
            if gone or (wrong_size and all_started)
            else Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=here if wrong_size else where or here,
            label=label,
            related=(
                *(Related("may have left here", way) for way in exits[:3] if way != where),
                *((Related(f"{waits} here", here),) if here and where else ()),
            ),
            summary=_summary_of_missing(rule, waits, absent, world, launched or 0, seen)
            + ("" if all_started or not wrong_size else " so far")
            + (f"; rank {late[0].rank} {_state(run, late[0])}" if late else ""),
            cause=cause.format(world=world, known=known),
            fix=fix,
            fix_kind=FixKind.CHECK,
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
                **({"stuck": _no_short_timeout(run, waiting)} if gone else {}),
            },
            deadlocked=gone and _no_short_timeout(run, waiting),
            at=first.wall(entered.at) if entered else run.started,
        )


_WORDS = {
    "world-larger-than-launched": (
        "waits for ranks that do not exist",
        "world_size is {world}, but only {known}",
        "omit `rank=` and `world_size=`: torchrun sets them in the environment",
    ),
    "processes-not-seen": (
        "waits for ranks that were not seen",
        "world_size is {world}, but only {known}: either no more were started, or the others have "
        "not called init_process_group",
        "set `world_size` to the number of processes that are started; if it is right, check what "
        "the missing ones do before init_process_group",
    ),
    "rank-exited-before": (
        "left here",
        "a process group is created only when every rank has called init_process_group",
        "call init_process_group on every rank, idle ones too, or launch fewer ranks",
    ),
    "rank-not-arrived": (
        "not in init_process_group",
        "a process group is created only when every rank has called init_process_group",
        "check what this line does on the missing ranks; do slow work once before the launch, or "
        "after init_process_group with a longer `timeout=`",
    ),
}
"""By rule: label, cause and fix of a finding about missing ranks."""


def _rule_for_missing(known: bool, left: bool, too_many: bool, launched: int | None) -> str:
    """The rule by which ranks are missing.

    Args:
        known: some missing ranks left a record. Their state says more than any count.
        left: all of these exited without failing.
        too_many: some missing ranks are beyond the number of processes.
        launched: that number, where it is known.
    """
    if not known and too_many:
        return "world-larger-than-launched"
    if not known and launched is None:
        return "processes-not-seen"
    return "rank-exited-before" if left else "rank-not-arrived"


def _summary_of_missing(
    rule: str, waits: str, absent: list[int], world: int, launched: int, seen: int
) -> str:
    if rule == "world-larger-than-launched":
        exist = counted(launched, "process exists", "processes exist")
        return f"{waits} in init_process_group for {world} ranks, but only {exist}"
    if rule == "processes-not-seen":
        found = counted(seen, "process was", "processes were")
        return f"{waits} in init_process_group for {world} ranks, but only {found} seen"
    verb = "does not reach" if len(absent) == 1 else "do not reach"
    return f"{ranks_text(absent)} {verb} init_process_group, where {waits}"


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
    if any(not _same_store(r) for r in run.ranks.values()):
        return []
    waiting = [r for r in run.ranks.values() if not _formed(r)]
    raised = [r for r in waiting if r.exception is not None]
    if not all(map(_gave_up, raised)):
        return []
    return waiting if run.stall is not None or raised else []


def _formed(rank: Rank) -> bool:
    """Whether a rank's latest `init_process_group` returned."""
    since = rank.of(InitEntered)[-1].at
    return any(e.at >= since for e in rank.of(GroupReady))


def _same_store(rank: Rank) -> bool:
    """Whether a rank's last two groups use the same store, one that outlives them: torchrun's, or
    a file."""
    before, entered = rank.of(InitEntered)[-2:]
    reported = rank.started.environment if rank.started else {}
    place = entered.rendezvous
    lasts = place.startswith("file://") or reported.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return lasts and before.rendezvous == place


def _no_store(rank: Rank) -> bool:
    """Whether a rank under torchrun was given another `tcp://` address than that of torchrun's
    store. All ranks then connect as clients to a store that none of them opens."""
    entered, reported = rank.latest(InitEntered), rank.started.environment if rank.started else {}
    own = f"tcp://{reported.get('MASTER_ADDR')}:{reported.get('MASTER_PORT')}"
    elastic = reported.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = entered.rendezvous if entered else ""
    return elastic and place.startswith("tcp://") and place != own


def _never_opened(run: Run, waiting: list[Rank]) -> bool:
    """Whether it is certain that no process will open the store: torchrun on a single node has
    started no other rank, the address belongs to this machine, and the stack of every rank is where
    torch connects to the store."""
    places = [e.rendezvous for r in waiting if (e := r.latest(InitEntered))]
    looks = [s for r in waiting if (s := _stood(run, r)) and s.frames]
    return (
        run.info.launcher == "run"
        and run.info.nodes <= 1
        and len(waiting) == run.world_size == len(looks)
        and all(place.startswith(_OWN) for place in places)
        and all(any(f.function == "_create_c10d_store" for f in s.frames) for s in looks)
    )


def _no_short_timeout(run: Run, waiting: list[Rank]) -> bool:
    """Whether the run stalls and no rank has a short `timeout=`, by which it would soon go on."""
    asked = (e.timeout_s for r in waiting for e in r.of(InitEntered))
    return run.stall is not None and not any(0 <= timeout < SHORT_S for timeout in asked)


def expected_world(rank: Rank) -> int:
    """The world size that a rank waits for; 0 where that is not known."""
    entered = rank.latest(InitEntered)
    if entered is None:
        return 0
    return entered.world_size if entered.world_size > 0 else max(entered.env_world_size, 0)


def _gave_up(rank: Rank) -> bool:
    """Whether a rank raised torch's error about a timeout or a lost connection."""
    raised = rank.exception
    return raised is not None and any(word in raised.message for word in TIMEOUTS)


def _where(run: Run, rank: Rank) -> Location | None:
    """The line at which a rank left, or where it was when its stack was taken."""
    if (leaving := _left(rank)) and (spot := rank.location(leaving.site)):
        return spot
    stood = _stood(run, rank)
    frame = stood.user_frame if stood else None
    if frame is None:
        return None
    return Location(shorten(frame.file, rank.cwd), frame.line, frame.function, frame.text)


def _stood(run: Run, rank: Rank) -> RankStood | None:
    """Where a rank was when the run stalled; None where that was not recorded."""
    stood = (e for node in run.nodes.values() for e in node.of(RankStood))
    mine = [e for e in stood if e.rank == rank.rank and e.attempt == run.attempt]
    return mine[-1] if mine else None


def _exits_before(came: Rank, left: Location | None) -> list[Location]:
    """The conditional `return`s and exits on the way to the `init_process_group` of the rank `came`
    by one of which another rank may have left. `left`: the line at which that one ended, if known:
    then only exits of functions that this line calls (`sys.exit(main())`)."""
    entered = came.latest(InitEntered)
    found = [came.location(site) for site in entered.past] if entered else []
    return [p for p in found if p and (left is None or f"{p.function}(" in left.source)]


def _left(rank: Rank) -> RankExiting | None:
    """How a rank exited; None if it did not, or if it failed."""
    leaving = rank.latest(RankExiting)
    fine = leaving is not None and leaving.how != "exception" and not leaving.status
    return leaving if fine else None


def _is_over(rank: Rank) -> bool:
    """Whether a rank's process was seen to end, not ended by the launcher."""
    ended, reported = rank.ended, rank.stopped
    return (
        ended is not None and not ended.by_launcher and (reported is None or ended.at < reported.at)
    )


def _state(run: Run, rank: Rank) -> str:
    """What a missing rank does, as a verb phrase: `has exited (return)`, `is at train.py:3`."""
    if leaving := _left(rank):
        where = rank.location(leaving.site)
        return f"has exited ({leaving.how}{f' at {where}' if where else ''})"
    if _is_over(rank):
        how = rank.signal or f"status {rank.exit_code}"
        return f"has ended ({how})"
    where = _where(run, rank)
    if where is not None:
        text = f" `{where.source.strip()}`" if where.source.strip() else ""
        return f"is at {where}{text}"
    return "is somewhere before it"
