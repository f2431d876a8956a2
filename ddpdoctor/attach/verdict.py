"""Says from where all ranks stand who waits for whom, and who is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..events import STOPPED_STATES
from ..report.findings import Confidence, Finding, FixKind, Related, Severity
from ..run import Location, counted, fold_ranks, listed, ranks_do, ranks_text, some
from .locks import same
from .own import is_own, short
from .records import JobLook, Worker
from .stands import BUSY, MESSAGES, WAKES, Awaited, Stand, stand_of

LOOK_LONGER = "look again for longer, with `ddpdoctor attach --seconds 30`"


def judge(job: JobLook) -> list[Finding]:
    """What is wrong with a job, as far as looks at its stacks tell: all of it suspected."""
    stands = [stand_of(rank) for rank in job.ranks]
    stopped = [s for s in stands if s.stopped]
    waiting = [s for s in stands if s.waits]
    apart = [s for s in stands if not s.waits and not s.stopped]
    missing = _missing(job)
    certain = [_stopped(stopped, waiting, apart)] if stopped else []
    if missing and waiting:
        certain.append(_gone(job, waiting, missing))
    if certain:
        return certain
    if not waiting:
        stuck = [s for s in stands if s.kind == "loader" and not s.goes_on]
        idle = not any(w.cpu >= BUSY for s in stuck for w in s.rank.workers)
        return [_loader(stuck, [])] if idle and stuck and len(stuck) == len(stands) else []
    here = {(s.op, str(s.place)) for s in waiting}
    if any(s.goes_on and (s.op, str(s.place)) in here for s in apart):
        return []  # it is in that call and goes on, so the others have not waited for long
    passing = _pass(job, waiting)
    if passing and not apart:
        return []
    if apart:
        loading = [s for s in apart if s.kind == "loader" and not s.moved]
        if len(loading) == len(apart):
            return [_loader(loading, waiting)]
        return [_absent(job, apart, waiting, slow=passing and _pass(job, apart))]
    if messages := _unanswered(waiting):
        return [_no_answer(messages, waiting)]
    return [_different(waiting)] if len(here) > 1 else [_all_wait(job, waiting)]


def _woken(job: JobLook, stand: Stand) -> int:
    """How often its thread slept and went on meanwhile."""
    return round(stand.wakes * job.apart_s)


def _pass(job: JobLook, stands: Sequence[Stand]) -> bool:
    """Whether ranks went on between looks that saw them at the same lines: a thread that waits in
    one collective, or sleeps in one call, does not wake."""
    return all(_woken(job, s) > 0 and s.kind not in ("init", "device", "gone") for s in stands)


def _missing(job: JobLook) -> list[int]:
    """Ranks that belong here and have no process."""
    seen = {rank.rank for rank in job.ranks}
    if job.launched <= len(seen):
        return []
    if job.launched >= job.world_size:
        return [n for n in range(job.launched) if n not in seen]
    first = {rank.rank - rank.local_rank for rank in job.ranks if rank.local_rank >= 0}
    if len(first) != 1:  # parts of several nodes
        return []
    begin = first.pop()
    return [n for n in range(begin, begin + job.launched) if n not in seen]


def _found(code: str, check: str, rule: str, **fields: object) -> Finding:
    given = {"severity": Severity.ERROR, "confidence": Confidence.SUSPECTED,
             "fix_kind": FixKind.CHECK, **fields}  # fmt: skip
    return Finding(code=code, check=check, rule=rule, **given)  # type: ignore[arg-type]


def _ranks(stands: Iterable[Stand]) -> tuple[int, ...]:
    return tuple(s.rank.rank for s in stands)


def _by_place(stands: Iterable[Stand]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for stand in stands:
        found.setdefault(stand.where, []).append(stand.rank.rank)
    return list(found.items())


def _wait(waiting: Sequence[Stand]) -> str:
    """`ranks 0-1 wait in barrier (train.py:5), rank 2 in all_reduce (train.py:9)`."""
    (where, ranks), *others = _by_place(waiting)
    more = [f"{ranks_text(mine)} in {there}" for there, mine in others]
    return some([f"{ranks_do(ranks, 'wait')} in {where}", *more], 6, of="places")


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _evidence(stands: Iterable[Stand]) -> list[dict[str, object]]:
    return [{"ranks": fold_ranks(ranks), "where": where} for where, ranks in _by_place(stands)]


def _related(stands: Sequence[Stand], than: Location | None) -> tuple[Related, ...]:
    found: dict[str, tuple[Location, list[int]]] = {}
    for stand in stands:
        if stand.place and str(stand.place) != str(than):
            found.setdefault(str(stand.place), (stand.place, []))[1].append(stand.rank.rank)
    return tuple(
        Related(f"{ranks_do(ranks, 'wait')} here", place) for place, ranks in found.values()
    )[:3]


def _label(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} {_are(ranks)} here"


def _operations(stands: Iterable[Stand]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(s.op for s in stands if s.op))


def _cores(stands: Iterable[Stand]) -> list[dict[str, object]]:
    return [{"rank": s.rank.rank, "cores": round(s.rank.cpu, 1)} for s in stands]


def _stopped(stopped: Sequence[Stand], waiting: Sequence[Stand], apart: Sequence[Stand]) -> Finding:
    """Ranks whose process does not run: whatever else they do, they cannot go on."""
    ranks, first = _ranks(stopped), stopped[0]
    traced = [s for s in stopped if s.rank.state == "t"]
    pids = " ".join(str(s.rank.pid) for s in stopped if s not in traced)
    fixes = [f"let it go on: `kill -CONT {pids}`"] if pids else []
    if traced:
        pid = traced[0].rank.pid
        fixes.append(f"end the debugger that holds it: `grep TracerPid /proc/{pid}/status`")
    causes = ["a signal has stopped"] if pids else []
    causes += ["a debugger holds"] if traced else []
    begin = f"{_wait(waiting)}; " if waiting else ""
    here = _ranks(s for s in stopped if s.place == first.place)
    return _found(
        "DDP603", "rank-missing", "stopped",
        ranks=ranks,
        subjects=_operations(waiting)[:1],
        location=first.place,
        label=f"{ranks_text(here)} {_are(here)} stopped here",
        related=_related(waiting, first.place),
        summary=f"{begin}{ranks_text(ranks)} {_are(ranks)} stopped, at "
        + some(dict.fromkeys(s.where for s in stopped), 4),
        cause=f"{' or '.join(causes)} {'its process' if len(ranks) == 1 else 'their processes'}",
        fix="; ".join(fixes),
        evidence={
            **({"waiting": _evidence(waiting)} if waiting else {}),
            "stopped": [{"rank": s.rank.rank, "pid": s.rank.pid, "where": s.where}
                        for s in stopped],
            **({"elsewhere": _evidence(apart)} if apart else {}),
        },
    )  # fmt: skip


def _absent(
    job: JobLook, apart: Sequence[Stand], waiting: Sequence[Stand], *, slow: bool
) -> Finding:
    """Ranks that are somewhere else while others wait; `slow`: all of them go on."""
    ranks = _ranks(apart)
    told: dict[tuple[str, str, str], list[Stand]] = {}
    for stand in apart:
        why = _slow(job, stand) if slow and not stand.goes_on else _why(job, stand)
        told.setdefault(why, []).append(stand)
    (rule, cause, fix), those = next(iter(told.items()))
    first = those[0]
    if len(told) > 1:
        cause = "; ".join(f"{ranks_text(_ranks(s))}: {why}" for (_, why, _), s in told.items())
    threads = tuple(
        Related(f"{a.name} of {ranks_text([first.rank.rank])} is here", a.place)
        for a in first.awaits
    )[:3]
    return _found(
        "DDP603", "rank-missing", rule,
        severity=Severity.WARNING if slow else Severity.ERROR,
        ranks=ranks,
        subjects=_operations(waiting)[:1],
        location=first.place,
        label=_label(_ranks(s for s in those if s.place == first.place)),
        related=(*threads, *_related(waiting, first.place)),
        summary=f"{_wait(waiting)}; {ranks_text(ranks)} {_are(ranks)} not there, but at "
        + some(dict.fromkeys(s.where + _for_whom(s) for s in apart), 4, of="places"),
        cause=cause,
        fix=fix,
        evidence={"waiting": _evidence(waiting), "elsewhere": _evidence(apart),
                  "cores used": _cores(apart)},
    )  # fmt: skip


def _for_whom(stand: Stand) -> str:
    """What the main thread waits for, after the place where it does."""
    if not stand.awaits:
        return ""
    first = stand.awaits[0]
    more = f" and {len(stand.awaits) - 1} more" if len(stand.awaits) > 1 else ""
    what = f"the lock `{stand.lock}` of " if first.holds else ""
    return f", where it waits for {what}{first.name}{more} (at {first.place})"


def _why(job: JobLook, stand: Stand) -> tuple[str, str, str]:
    """Rule, cause and fix of a rank that is somewhere else."""
    if stand.kind == "gone":
        return (
            "not-readable",
            f"its stack could not be read: {stand.rank.trouble}",
            "look at its log: it may have ended, or failed in code that is not Python's",
        )
    if stand.awaits or stand.lock:
        return _thread(job, stand)
    if stand.goes_on:
        return (
            "busy",
            f"it goes on: {_activity(job, stand)}",
            "see what this line does on that rank; look again later, with `ddpdoctor attach`",
        )
    polls = ", but slept and went on again and again" if _woken(job, stand) else ""
    return (
        "idle",
        f"it waits there, {_cpu(stand)}, and did not move between {_looks(job)}{polls}",
        "see what this line waits for on that rank; it may only be slow there: " + LOOK_LONGER,
    )


def _slow(job: JobLook, stand: Stand) -> tuple[str, str, str]:
    """Rule, cause and fix of a rank that others wait for again and again."""
    return (
        "slow",
        f"it is slow there: it was seen there in {_looks(job)}, but slept and went on "
        f"{counted(_woken(job, stand), 'time')}, and so did those that wait for it",
        f"see why this line takes longer on that rank than on others; {LOOK_LONGER}",
    )


def _looks(job: JobLook) -> str:
    return "two looks" if job.looks <= 2 else f"{job.looks} looks in {job.apart_s:.0f} s"


def _cpu(stand: Stand) -> str:
    cores = f"{stand.rank.cpu:.1f}"
    return "uses no CPU time" if cores == "0.0" else f"uses {cores} cores"


def _activity(job: JobLook, stand: Stand) -> str:
    cause = "its process " + _cpu(stand)
    if stand.moved:
        cause += f", and it has moved between {_looks(job)}"
    elif stand.wakes > WAKES:
        cause += f", and it slept and went on {stand.wakes:.0f} times a second"
    return cause


def _thread(job: JobLook, stand: Stand) -> tuple[str, str, str]:
    """Rule, cause and fix of a rank whose main thread waits for another thread, or for a lock."""
    if stand.lock and not any(a.holds for a in stand.awaits):
        seen = some((_at(a) for a in stand.awaits), 3)
        others = f"; its other threads: {seen}" if seen else ""
        return (
            "lock",
            f"its main thread waits to take `{stand.lock}`; who holds that is not seen{others}",
            f"see where `{stand.lock}` is taken and not given back on that rank",
        )
    first = stand.awaits[0]
    if stand.lock:
        cause = f"its main thread waits for the lock `{stand.lock}`, held by {_at(first)}"
        if first.wants:
            return (
                "lock",
                f"{cause}; that thread waits for `{first.wants}`, which the main thread holds: "
                "neither can go on",
                f"take `{first.wants}` and `{stand.lock}` in the same order in all threads"
                if not same(first.wants, stand.lock)
                else "use one lock for each purpose",
            )
        return (
            "lock",
            f"{cause}; {_motion(job, first)}",
            "see what that thread does while it holds the lock",
        )
    ways = listed([f"{_at(a)}; {_motion(job, a)}" for a in stand.awaits[:3]])
    return (
        "other-thread",
        f"its main thread waits for {ways}",
        "see what that line does; "
        + ("look again later" if first.goes_on else f"it may only be slow: {LOOK_LONGER}"),
    )


def _at(awaited: Awaited) -> str:
    source = f" (`{awaited.place.source}`)" if awaited.place.source else ""
    return f"{awaited.name} at {awaited.place}{source}"


def _motion(job: JobLook, awaited: Awaited) -> str:
    if awaited.moved:
        return f"it has moved between {_looks(job)}"
    if awaited.goes_on:
        return "it computes or polls there"
    return f"it did not move between {_looks(job)}"


def _loader(loading: Sequence[Stand], waiting: Sequence[Stand]) -> Finding:
    """Ranks that wait for a batch."""
    first, ranks = loading[0], _ranks(loading)
    workers = [w for s in loading for w in s.rank.workers]
    cause, fix = _of_workers(workers)
    return _found(
        "DDP608", "data-stall", "data-stall",
        ranks=ranks,
        location=first.place,
        label="waits for a batch",
        related=_related(waiting, first.place),
        summary=f"{ranks_do(ranks, 'wait')} for a batch of "
        + ("its loader" if len(ranks) == 1 else "their loaders")
        + (f", and {_wait(waiting)}" if waiting else ""),
        cause=cause,
        fix=fix,
        evidence={"workers": [
            {"pid": w.pid, "state": w.state, "cores": w.cpu} for w in workers[:8]
        ], **({"waiting": _evidence(waiting)} if waiting else {})},
    )  # fmt: skip


def _of_workers(workers: Sequence[Worker]) -> tuple[str, str]:
    """Why there is no batch, and what to do."""
    stopped = [str(w.pid) for w in workers if w.state in STOPPED_STATES]
    ended = [str(w.pid) for w in workers if w.state in ("Z", "")]
    if stopped:
        which = f"{'worker' if len(stopped) == 1 else 'workers'} {listed(stopped)}"
        return (
            f"{which} {'is' if len(stopped) == 1 else 'are'} stopped by a signal",
            f"let it go on: `kill -CONT {' '.join(stopped)}`",
        )
    if ended:
        which = f"{'worker' if len(ended) == 1 else 'workers'} {listed(ended)}"
        return (
            f"{which} {'has' if len(ended) == 1 else 'have'} ended",
            "see in the log of the run why: out of memory, or a crash in the dataset",
        )
    places = {f"{f.file}:{f.line}": f for w in workers for f in w.frames if not is_own(f.file)}
    fix = "see what the dataset does there: a file system that does not answer, a lock, a queue"
    if inner := next(iter(places.values()), None):
        busy = [w.cpu for w in workers if w.cpu >= BUSY]
        goes_on = f", and its workers go on: one uses {max(busy):.1f} cores" if busy else ""
        return f"a worker stands at {short(inner.file)}:{inner.line} `{inner.source}`{goes_on}", fix
    if workers:
        return "what its workers do is not known", fix
    return "it loads in its own process", fix


def _gone(job: JobLook, waiting: Sequence[Stand], missing: Sequence[int]) -> Finding:
    """Ranks that have no process here any more."""
    return _found(
        "DDP604", "rank-exited-early", "no-process",
        ranks=tuple(missing),
        related=_related(waiting, None),
        summary=f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} no process here, "
        f"and {_wait(waiting)}",
        cause=f"{counted(job.launched, 'rank belongs', 'ranks belong')} on {job.node}, "
        f"{len(job.ranks)} {'is' if len(job.ranks) == 1 else 'are'} there: "
        f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} ended, or never began, "
        "and cannot answer",
        fix="look at the log and the exit status of these ranks",
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip


def _unanswered(waiting: Sequence[Stand]) -> list[Stand]:
    """Those that wait for a message, where nobody waits in another collective."""
    calls = [s for s in waiting if s.kind != "device"]
    return [s for s in calls if s.op in MESSAGES] if all(s.op in MESSAGES for s in calls) else []


def _no_answer(messages: Sequence[Stand], waiting: Sequence[Stand]) -> Finding:
    """Ranks that send or receive, and no other answers."""
    first, ranks = messages[0], _ranks(messages)
    receiving = {"recv" in s.op for s in messages if s.op != "batch_isend_irecv"}
    cause = (
        "all of them receive, and none sends"
        if receiving == {True}
        else "all of them send, and none receives"
        if receiving == {False}
        else "no two of these messages match: the other side of each is somewhere else"
    )
    return _found(
        "DDP601", "collective-mismatch", "no-answer",
        ranks=ranks,
        subjects=_operations(messages),
        location=first.place,
        label=f"{ranks_do(_ranks(s for s in messages if s.place == first.place), 'wait')} here",
        related=_related(waiting, first.place),
        summary=_wait([*messages, *(s for s in waiting if s not in messages)]),
        cause=f"{cause}, so each waits for ever",
        fix="of two ranks, let one send first and the other receive first, or hand both messages "
        "to `dist.batch_isend_irecv`; see that each `recv` has a `send` of its peer, with the "
        "same tag and group",
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip


def _different(waiting: Sequence[Stand]) -> Finding:
    """All wait, but not in the same call."""
    by_place = sorted(_by_place(waiting), key=lambda item: len(item[1]))
    few = next(s for s in waiting if s.where == by_place[0][0])
    ranks = tuple(by_place[0][1])
    messages = any(s.op in MESSAGES for s in waiting)
    fix = (
        "see that each `recv` has a `send` of its peer, which the peer calls before it waits for "
        "anything else, and that all ranks issue the same collectives in the same order"
        if messages
        else "make all ranks issue the same collectives in the same order"
    )
    return _found(
        "DDP601", "collective-mismatch", "different-calls",
        ranks=ranks,
        subjects=_operations(waiting),
        location=few.place,
        label=f"{ranks_do(ranks, 'wait')} here",
        related=_related(waiting, few.place),
        summary="ranks wait in different calls: " + "; ".join(
            f"{ranks_text(ranks)} in {where}" for where, ranks in by_place
        ),
        cause="each waits for the others in a call that they are not in",
        fix=f"{fix}; run it again under `ddpdoctor run`, which records the calls and says where "
        "they parted",
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip


def _all_wait(job: JobLook, waiting: Sequence[Stand]) -> Finding:
    """All that are known wait in the same call."""
    there, ranks = waiting[0], _ranks(waiting)
    elsewhere = job.world_size - len(job.ranks)
    rule, cause, fix = (
        "all-in-one-call",
        "all ranks are in the same call: its number, its sizes or the network may differ, which "
        "stacks do not show",
        "run it again under `ddpdoctor run`, which compares the calls of all ranks",
    )
    if elsewhere > 0:
        rule = "others-missing"
        cause = f"{counted(elsewhere, 'rank is', 'ranks are')} elsewhere: who is missing is there"
        fix = "run `ddpdoctor attach --json FILE` on every node, then `ddpdoctor report FILE...`"
    elif there.kind == "init":
        cause = f"all ranks are there and do not meet at {job.address.partition(' ')[0]}"
        fix = (
            "see that MASTER_ADDR, MASTER_PORT, WORLD_SIZE and the network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) are right on all of them"
        )
    return _found(
        "DDP609", "stall", rule,
        severity=Severity.WARNING,
        ranks=ranks,
        subjects=_operations(waiting)[:1],
        location=there.place,
        label=f"{ranks_do(ranks, 'wait')} here",
        summary=f"{_wait(waiting)}, and none has moved",
        cause=cause,
        fix=fix,
        evidence={"waiting": _evidence(waiting)},
    )  # fmt: skip
