"""DDP102."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.process.left_early import SHORT_S, gone_for_good, waits_for_all
from ddpdoctor.analysis.process.rank_claims import claims, unentered
from ddpdoctor.events import GroupReady, InitEntered, RankExiting, RankStood
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Related, Severity
from ddpdoctor.run import Location, Rank, Run, fold_ranks, ranks_do, ranks_text, shorten

TIMEOUTS = ("Timed out", "timed out", "timeout", "worker_count", "Connection", "recvValue")

_OWN = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
"""Addresses that lead to no other machine."""


class RendezvousStall(Check):
    """Some ranks never reach `init_process_group`

    ## What it finds
    Ranks that wait in `init_process_group` for others that do not come: they are still in
    something else before it, they ended, or there are fewer of them than `world_size` says. Names
    who came, who did not, and where these are. Also ranks that are all there and do not meet: at
    a `tcp://` address where, under torchrun, nobody listens, or after a restart, where the ranks of
    the attempt before are still in torchrun's store and gloo looks for them; so it is where the
    program destroys its group and forms it again.

    ## How it knows
    Each rank records when it enters `init_process_group` and when it has its group. The finding is
    made once a rank has waited in there for the stall time (`--hang-after`; by default 30 s before
    training begins), or has raised a timeout or a lost connection; the stacks of the ranks that are
    missing, taken at that moment, say where they are. Where `ddpdoctor run` launched them it is
    proven if `world_size` is larger than their number, and if the processes of all that are missing
    have ended with status 0 on one node, with no restart left and no process that they started;
    that stops the run unless `--on-hang report` or a short `timeout=` is given. So it is where all
    of one node look for a store at an address of this machine, which none of them opens. Else it is
    suspected. Of a program that starts its ranks itself only those are known that came to
    `init_process_group`.

    ## Why it hurts
    `init_process_group` waits for everybody, half an hour by default (ten minutes with NCCL), and
    then every rank that did come raises an error that names nobody.

    ## How to fix it
    Look at the line where the missing rank is. If `world_size` is wrong, leave `rank=` and
    `world_size=` out and let torchrun set them.

    ## When it stays quiet
    Slow imports and downloads that end in time.
    """

    code = "DDP102"
    name = "rendezvous-stall"
    family = "launch"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return unentered(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        waiting = [r for r in run.ranks.values() if _waits(r)]
        if run.store_used_before and (met_nobody := _met_nobody(run, waiting)):
            yield self._after_restart(run, met_nobody)
            return
        if again := _again(run):
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

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check != "first-failure":
            return other.check in ("stall", "rank-missing")
        if other.evidence.get("consequence"):  # torch gave up waiting
            return True
        if "groups_before" in mine.evidence:  # they raised because they found nobody
            return set(other.ranks) <= set(mine.ranks)
        return bool(mine.evidence.get("attempt")) or not set(mine.ranks) & set(other.ranks)

    def _after_restart(self, run: Run, waiting: list[Rank]) -> Finding:
        """They look for the ranks of the attempt before."""
        first = waiting[0]
        entered = first.latest(InitEntered)
        ranks = [r.rank for r in waiting]
        raised = first.exception.message if first.exception else ""
        return self.finding(
            ranks=tuple(ranks),
            confidence=Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=first.location(entered.site) if entered else None,
            label="looks for the ranks of the attempt before",
            summary=f"after the restart {ranks_text(ranks)} "
            f"{'find' if len(ranks) > 1 else 'finds'} no other rank in init_process_group",
            cause=f"torchrun's store outlives the ranks: the addresses that attempt "
            f"{run.attempt - 1} wrote there are still in it, and gloo takes those that are not "
            "yet written anew; whether a restart works is a matter of luck",
            fix="`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment, with `--standalone` or "
            "`--rdzv-backend=c10d`: each attempt then makes a store of its own",
            fix_kind=FixKind.CHECK,
            evidence={
                "attempt": run.attempt,
                "came": fold_ranks(ranks),
                "meets_at": entered.rendezvous if entered else "",
                **({"message": raised[:500]} if raised else {}),
            },
            at=first.wall(entered.at) if entered else 0.0,
        )

    def _formed_again(self, run: Run, waiting: list[Rank]) -> Finding:
        """They look for the ranks of a group that was destroyed."""
        first = waiting[0]
        *before, entered = first.of(InitEntered)
        ranks = [r.rank for r in waiting]
        return self.finding(
            ranks=tuple(ranks),
            confidence=Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=first.location(entered.site),
            label=f"meets at {entered.rendezvous} once more",
            summary=f"{ranks_do(ranks, 'find')} no other rank in init_process_group number "
            f"{len(before) + 1}; all ranks came there, and the group does not form again",
            cause="the store outlives the group that was destroyed: the addresses that its ranks "
            "wrote there are still in it, and the backend takes those that are not yet written "
            "anew; whether the next group works is a matter of luck",
            fix="form the group once, and destroy it at the end; or give each group names of its "
            'own in the store: `init_process_group(backend, store=dist.PrefixStore(f"group {n}", '
            "store), rank=rank, world_size=world_size)`",
            fix_kind=FixKind.CHECK,
            evidence={
                "groups_before": len(before),
                "in_init_process_group": fold_ranks(ranks),
                "meets_at": entered.rendezvous,
            },
            at=first.wall(entered.at),
        )

    def _nobody_answers(self, run: Run, waiting: list[Rank]) -> Finding:
        """All are there, and they do not meet."""
        first = waiting[0]
        entered = first.latest(InitEntered)
        place = entered.rendezvous if entered else ""
        ranks = [r.rank for r in waiting]
        alone = all(_no_store(r) for r in waiting)
        never = alone and _never_opened(run, waiting)
        return self.finding(
            ranks=tuple(ranks),
            confidence=Confidence.PROVEN if never else Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=first.location(entered.site) if entered else None,
            label=f"meets at {place}",
            summary=f"{ranks_do(ranks, 'wait')} in init_process_group at {place}; no rank is "
            "missing, and the group does not form",
            cause="under torchrun no rank opens a store: torchrun's own is at MASTER_ADDR and "
            "MASTER_PORT, and at this address nobody listens"
            if alone
            else "rank 0 cannot be reached at this address, or something else listens there",
            fix="leave `init_method=` out, or give `env://`: torchrun has set the address"
            if alone
            else "check the address, that the port is free on rank 0's machine, and that the other "
            "machines reach it",
            fix_kind=FixKind.CHECK,
            evidence={
                "came": fold_ranks(ranks),
                "meets_at": place,
                **({"stuck": _patient(run, waiting)} if never else {}),
            },
            at=first.wall(entered.at) if entered else 0.0,
        )

    def _report(
        self,
        run: Run,
        waiting: list[Rank],
        absent: list[int],
        world: int,
    ) -> Finding:
        first = waiting[0]
        entered = first.latest(InitEntered)
        here = first.location(entered.site) if entered else None
        launched, seen = _launched(run, waiting), len(run.ranks)
        too_many = [r for r in absent if launched is not None and r >= launched]
        late = [run.ranks[r] for r in absent if r in run.ranks]
        where = next((w for r in late if (w := _where(run, r))), None)
        left = bool(late) and all(_left(r) for r in late)
        past = _past(first, where) if left else []
        where = past[0] if len(past) == 1 else where
        all_there = run.info.launcher == "run"
        never = (
            left
            and len(late) == len(absent)
            and all(gone_for_good(run, r) for r in late)
            and all(waits_for_all(c) for c in claims(run) if c.process in waiting)
        )
        came = fold_ranks(r.rank for r in waiting)
        evidence = {
            "came": came,
            "absent": fold_ranks(absent),
            "world_size_expected": world,
            **({"processes_seen": seen} if launched is None else {"processes_launched": launched}),
            "absent_ranks": [{"rank": r.rank, "state": _state(run, r)} for r in late],
            **({"stuck": _patient(run, waiting)} if never else {}),
        }
        wrong_size = bool(too_many) and not late
        unseen = launched is None and not late
        # Who launches ranks himself may be about to launch the others.
        exist = f"only {launched} exist{'' if all_there else ' so far'}" if wrong_size else ""
        exist = f"only {seen} were seen" if unseen else exist
        return self.finding(
            ranks=tuple(r.rank for r in waiting) if wrong_size else tuple(absent),
            confidence=Confidence.PROVEN
            if never or (wrong_size and all_there)
            else Confidence.SUSPECTED,
            subjects=("init_process_group",),
            location=here if wrong_size else where or here,
            label="may have left here"
            if len(past) == 1
            else "waits for ranks that do not exist"
            if wrong_size
            else "waits for ranks that were not seen"
            if unseen
            else "left here"
            if where and left
            else "not in init_process_group",
            related=(
                *(Related("may have left here", way) for way in past[:3] if way != where),
                *((Related(f"{_wait(waiting)} here", here),) if here and where else ()),
            ),
            summary=_summary(_wait(waiting), absent, world, exist)
            + (f"; rank {late[0].rank} is {_state(run, late[0])}" if late else ""),
            cause=f"world_size is {world}, but {launched} processes were launched"
            if wrong_size
            else f"world_size is {world}, and {seen} processes were seen: no more were "
            "started, or the others never came to init_process_group"
            if unseen
            else "a process group forms only when every rank has called init_process_group",
            fix="leave `rank=` and `world_size=` out: torchrun sets them in the environment"
            if wrong_size
            else "let `world_size` be the number of processes that are started; where it is, see "
            "what the others do before init_process_group"
            if unseen
            else "let every rank come to init_process_group, also one that has nothing to do, or "
            "start fewer"
            if left
            else "see what the line does on the ranks that are missing; do slow work once, before "
            "the launch, or after init_process_group with a longer `timeout=`",
            fix_kind=FixKind.CHECK,
            evidence=evidence,
            at=first.wall(entered.at) if entered else run.started,
        )


def _launched(run: Run, waiting: list[Rank]) -> int | None:
    """How many processes there are, as who launched them said; None where a program that starts
    them itself says no more than what its ranks wait for."""
    reported = any("WORLD_SIZE" in r.started.environment for r in waiting if r.started)
    if run.info.launcher != "run" and not reported and run.info.world_size > len(run.ranks):
        return None
    return max(len(run.ranks), run.info.world_size)


def _waits(rank: Rank) -> bool:
    """Whether a rank entered `init_process_group` and did not get its group."""
    return bool(rank.of(InitEntered)) and not rank.of(GroupReady)


def _met_nobody(run: Run, waiting: list[Rank]) -> list[Rank]:
    """Ranks that could not reach another one; all of them, where all stand there."""
    refused = [r for r in waiting if _gave_up(r)]
    return refused or (waiting if run.stall is not None and len(waiting) == len(run.ranks) else [])


def _again(run: Run) -> list[Rank]:
    """Ranks that came to form a group anew and cannot, where all came, and what the first group
    wrote is still where they meet."""
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
    """Whether a rank has the group for which it came last."""
    since = rank.of(InitEntered)[-1].at
    return any(e.at >= since for e in rank.of(GroupReady))


def _same_store(rank: Rank) -> bool:
    """Whether the last two groups meet in a store that outlives them: torchrun's, or a file."""
    before, entered = rank.of(InitEntered)[-2:]
    reported = rank.started.environment if rank.started else {}
    place = entered.rendezvous
    lasts = place.startswith("file://") or reported.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return lasts and before.rendezvous == place


def _no_store(rank: Rank) -> bool:
    """Whether it is to meet the others somewhere else than at torchrun's store, which all ranks
    expect to be there."""
    entered, reported = rank.latest(InitEntered), rank.started.environment if rank.started else {}
    own = f"tcp://{reported.get('MASTER_ADDR')}:{reported.get('MASTER_PORT')}"
    elastic = reported.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = entered.rendezvous if entered else ""
    return elastic and place.startswith("tcp://") and place != own


def _never_opened(run: Run, waiting: list[Rank]) -> bool:
    """Whether nobody comes who opens that store: torchrun on one node has started no other rank,
    the address is this machine's own, and every rank stands where torch looks for the store."""
    places = [e.rendezvous for r in waiting if (e := r.latest(InitEntered))]
    looks = [s for r in waiting if (s := _stood(run, r)) and s.frames]
    return (
        run.info.launcher == "run"
        and run.info.nodes <= 1
        and len(waiting) == run.world_size == len(looks)
        and all(place.startswith(_OWN) for place in places)
        and all(any(f.function == "_create_c10d_store" for f in s.frames) for s in looks)
    )


def _patient(run: Run, waiting: list[Rank]) -> bool:
    """Whether they stand still, and do not give up soon."""
    asked = (e.timeout_s for r in waiting for e in r.of(InitEntered))
    return run.stall is not None and not any(0 <= timeout < SHORT_S for timeout in asked)


def expected_world(rank: Rank) -> int:
    """How many ranks this one waits for."""
    entered = rank.latest(InitEntered)
    if entered is None:
        return 0
    return entered.world_size if entered.world_size > 0 else max(entered.env_world_size, 0)


def _gave_up(rank: Rank) -> bool:
    raised = rank.exception
    return raised is not None and any(word in raised.message for word in TIMEOUTS)


def _where(run: Run, rank: Rank) -> Location | None:
    """The line by which a rank left, or the one that it is at, by its stack."""
    if (leaving := _left(rank)) and (spot := rank.location(leaving.site)):
        return spot
    stood = _stood(run, rank)
    frame = stood.user_frame if stood else None
    if frame is None:
        return None
    return Location(shorten(frame.file, rank.cwd), frame.line, frame.function, frame.text)


def _stood(run: Run, rank: Rank) -> RankStood | None:
    """Where it was when the run stood still."""
    stood = (e for node in run.nodes.values() for e in node.of(RankStood))
    mine = [e for e in stood if e.rank == rank.rank and e.attempt == run.attempt]
    return mine[-1] if mine else None


def _past(came: Rank, left: Location | None) -> list[Location]:
    """The `if` that return or exit before the line at which a rank came, where another one ended by
    itself, or at a line that calls their function: `sys.exit(main())`."""
    entered = came.latest(InitEntered)
    found = [came.location(site) for site in entered.past] if entered else []
    return [p for p in found if p and (left is None or f"{p.function}(" in left.source)]


def _left(rank: Rank) -> RankExiting | None:
    """How a rank left, where that was no failure."""
    leaving = rank.latest(RankExiting)
    fine = leaving is not None and leaving.how != "exception" and not leaving.status
    return leaving if fine else None


def _is_over(rank: Rank) -> bool:
    """Whether its process was seen to end by itself."""
    ended, reported = rank.ended, rank.stopped
    return (
        ended is not None and not ended.by_launcher and (reported is None or ended.at < reported.at)
    )


def _state(run: Run, rank: Rank) -> str:
    if leaving := _left(rank):
        where = rank.location(leaving.site)
        return f"gone ({leaving.how}{f' at {where}' if where else ''})"
    if _is_over(rank):
        how = rank.signal or f"status {rank.exit_code}"
        return f"gone ({how})"
    where = _where(run, rank)
    if where is not None:
        text = f" `{where.source.strip()}`" if where.source.strip() else ""
        return f"at {where}{text}"
    return "somewhere before it"


def _wait(ranks: list[Rank]) -> str:
    folded = fold_ranks(r.rank for r in ranks)
    return f"ranks {folded} wait" if len(ranks) > 1 else f"rank {folded} waits"


def _summary(came: str, absent: list[int], world: int, exist: str) -> str:
    if exist:
        return f"{came} in init_process_group for {world} ranks, but {exist}"
    return (
        f"rank{'s' if len(absent) > 1 else ''} {fold_ranks(absent)} "
        f"{'do' if len(absent) > 1 else 'does'} not reach init_process_group, where {came}"
    )
