"""DDP606."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ddpdoctor.analysis.divergence.mismatch_report import never_made
from ddpdoctor.analysis.waiting.failures import (
    EXIT_RAISED,
    Failure,
    at_teardown,
    cut,
    cut_to_difference,
    failures,
    is_done,
    left_waiting,
    raised_exit,
    spawn_failed,
    step_of,
    translate,
    unseen,
)
from ddpdoctor.analysis.waiting.missing_file import astray
from ddpdoctor.events import (
    ExceptionRaised,
    GroupDestroyed,
    InitEntered,
    ProcessEnded,
    RankExiting,
    SpawnFailed,
)
from ddpdoctor.report.findings import Check, Evidence, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Run, fold_ranks, ranks_text, shorten

RAISED_BY_US = "ddpdoctor.FaultFound"
QUIT = "bdb.BdbQuit"
NO_PYTHON = ("SyntaxError", "IndentationError", "TabError")


class FirstFailure(Check):
    """The rank that failed first, and what the other tracebacks are worth

    ## What it finds
    Of all ranks that failed, the earliest that failed *on its own*: an exception in its code, or an
    exit status of its own; also of a process that `torch.multiprocessing.spawn` made with them and
    that is no rank, where it raised. Connection errors and timeouts on the others are its
    consequences and are folded under it; equal exceptions on several ranks are told once. Of a file
    that a rank did not find it says where another one wrote it, if each made the path from the
    clock or at random.

    ## How it knows
    Each rank records the exceptions that leave its program, or that it handles as it exits with a
    bad status, or has logged or printed (`traceback`) just before, with no call since; and when the
    call failed that raised them; the launcher and the node's monitor record how processes end. The
    failures of all ranks are put in the order of these times; torch's errors whose text speaks of a
    lost connection or of a timeout count as consequences, and so does what is raised while one of
    these is handled. Of a text that is no Python it shows the line that could not be parsed, of a
    debugger that was quit the `breakpoint()` before. The finding is proven.

    ## Why it hurts
    When one rank fails, the others lose their connections and fail too, some before it is even
    noticed. torchrun names the process that ended first, which is often one that only waited.

    ## How to fix it
    Look at the exception and the line given here, not at the connection errors of the others.

    ## When it stays quiet
    A run that ends well, or that somebody stopped. An abort at teardown, after the program has
    ended and in no line of it, is a note: torch does that now and then.
    """

    code = "DDP606"
    name = "first-failure"
    family = "hang"
    severity = Severity.ERROR

    def examine(self, run: Run) -> Iterable[Finding]:
        found = failures(run)
        aborts = [f for f in found if f.kind == "signal" and at_teardown(run, f)]
        rest = [f for f in found if f not in aborts]
        own = [f for f in rest if f.kind in ("exception", "exit")]
        died = [f for f in rest if f.kind == "signal"]
        lost = [f for f in rest if f.kind == "lost"]
        first = next(iter(unseen(run)), None)
        if first and first.at < min((f.at for f in (*own, *died)), default=math.inf):
            if first.kind == "exit":  # else it is told by rank-died
                yield self._report_unseen(first, [*own, *lost, *died])
            return
        if spawned := spawn_failed(run):
            raised, ended = spawned
            if raised.wall < min((f.at for f in own), default=math.inf):
                yield self._report_spawned(raised, [*own, *lost, *ended])
                return
        if died and (not own or died[0].at < own[0].at):
            return  # told by rank-died
        if own and _reported_to_stop(own[0]):
            return  # asked for by `raise_on`: the finding that it carries is the failure
        if own:
            yield self._report(run, own, [*lost, *died])
        elif lost:
            yield self._report_lost(run, lost)
        elif aborts:
            yield self._report_abort(run, aborts)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if mine.severity is not Severity.ERROR or mine.evidence.get("consequence"):
            return False
        if other.check == "data-stall":  # a worker that died is why its own rank raised
            return not set(mine.ranks) & set(other.ranks)
        effects = "rank-missing", "rank-exited-early", "rank-died", "stall", "rendezvous-stall"
        return other.check in effects or never_made(other)

    def _report(self, run: Run, own: list[Failure], followers: list[Failure]) -> Finding:
        first = own[0]
        same = [f for f in own if f.signature == first.signature]
        ranks = tuple(sorted(f.rank.rank for f in same))
        where = first.location
        step = step_of(first)
        at_step = "" if step is None else f"at step {step}, "
        others = [f for f in own if f not in same] + followers
        message = first.message
        what = first.kind_raised if first.exception else first.text
        lost = astray(run, first)
        if first.worker:
            summary = f"{at_step}{first.text}, raised in {first.worker} of {ranks_text(ranks)}"
        elif first.exception:
            summary = f"{at_step}{ranks_text(ranks)} raised {first.text}{_caught(first)}"
            summary += f"; it was handling {first.before}" if first.before else ""
            summary += _in_other_words(same)
        else:
            summary = f"{at_step}{ranks_text(ranks)} left with {first.text}"
        return self.finding(
            ranks=ranks,
            steps=None if step is None else Steps.of([step]),
            subjects=(what,),
            location=where,
            label=_label(first),
            related=_received(first) + (lost.related if lost else ()),
            summary=summary,
            cause=(f"{lost.cause}; " if lost else "") + _cause(run, first, ranks, others),
            fix=lost.fix if lost else _fix(run, first, ranks, alike=not _in_other_words(same)),
            fix_kind=FixKind.CHECK,
            evidence={
                "message": message[:2000],
                **({"written_by_another_rank": lost.path} if lost else {}),
                **_traceback(first),
                **({"stuck": True} if left_waiting(run, ranks) else {}),
                **_aftermath(first.at, others),
                **_named_by_torchrun(run, ranks),
            },
            at=first.at,
        )

    def _report_lost(self, run: Run, lost: list[Failure]) -> Finding:
        first = lost[0]
        message = first.exception.message if first.exception else ""
        ranks = tuple(sorted(f.rank.rank for f in lost))
        return self.finding(
            ranks=ranks,
            subjects=(first.exception.kind,) if first.exception else (),
            location=first.location,
            label="waited here",
            summary=f"{ranks_text(ranks)} lost the other ranks: {first.text}",
            cause=(translate(message) or "another rank ended or did not come")
            + "; no rank was seen to fail on its own",
            fix="look at the ranks that are not named here, and at the network between them",
            fix_kind=FixKind.CHECK,
            evidence={"message": message[:2000], "consequence": True},
            at=first.at,
        )

    def _report_abort(self, run: Run, aborts: list[Failure]) -> Finding:
        ranks = tuple(sorted(f.rank.rank for f in aborts))
        ended = [r for r in run.ranks.values() if r.signal == "SIGTERM" and not is_done(r)]
        others = ranks_text(r.rank for r in ended)
        cut_off = f"{others} was told to end because of it, and was not seen to be done before"
        return self.finding(
            severity=Severity.NOTE,
            ranks=ranks,
            subjects=(aborts[0].rank.signal or "",),
            summary=f"{ranks_text(ranks)} ended with {aborts[0].rank.signal} at teardown, after "
            f"all {'its ' if ended else ''}work was done",
            cause="torch's own threads are still running when the interpreter goes away; "
            + (cut_off if ended else "results and checkpoints are complete"),
            fix="end with a small collective (`dist.barrier()`) and `dist.destroy_process_group()`",
            fix_kind=FixKind.TEMPLATE,
            evidence={"signal": aborts[0].rank.signal, "steps": aborts[0].rank.steps},
            at=aborts[0].at,
        )

    def _report_unseen(self, first: Failure, followers: list[Failure]) -> Finding:
        """A rank that left no record ended with an error before any other."""
        late = ranks_text(f.rank.rank for f in followers)
        follow = f"; what {late} reported follows from it" if followers else ""
        return self.finding(
            ranks=(first.rank.rank,),
            summary=f"rank {first.rank.rank} ended first, with {first.text}",
            cause="there is no record of this process (the probe did not reach it, or its files "
            f"are gone), so that its exception is not known{follow}",
            fix="look at its output: `--log-dir logs --redirects 3` keeps one file per rank",
            fix_kind=FixKind.TEMPLATE,
            evidence={"status": first.status, **_aftermath(None, followers)},
            at=first.at,
        )

    def _report_spawned(self, raised: SpawnFailed, followers: list[Failure]) -> Finding:
        """A process that was spawned with the ranks, and is none, raised."""
        cwd = followers[0].rank.cwd
        spots = [Location(shorten(f.file, cwd), f.line, f.function, f.text) for f in raised.frames]
        lines = raised.message.strip().splitlines()
        what = cut(": ".join((raised.kind, *lines[:1])), 200)
        late = ranks_text(f.rank.rank for f in followers)
        return self.finding(
            ranks=(),
            subjects=(raised.kind,),
            location=spots[-1] if spots else None,
            label="raised here",
            summary=f"process {raised.index} of the {raised.count} that "
            f"`torch.multiprocessing.spawn` made, which was in no process group, raised {what}",
            cause=f"it failed first, and `torch.multiprocessing.spawn` then ended all others: what "
            f"became of {late} follows from it",
            fix="read the exception",
            fix_kind=FixKind.CHECK,
            evidence={"message": raised.message[:2000], **_aftermath(raised.wall, followers)},
            at=raised.wall,
        )


def _label(first: Failure) -> str:
    if first.kind_raised == QUIT:
        return "stops in the debugger here"
    return "raised here" if first.exception else "left here"


def _caught(first: Failure) -> str:
    if first.exception is None or not first.exception.caught:
        return ""
    return f", caught it and left with exit status {first.status}"


def _in_other_words(same: list[Failure]) -> str:
    """What a rank said that raised the same at the same line, where it is not the same text."""
    other = next((f for f in same if _words(f) != _words(same[0])), None)
    if other is None:
        return ""
    text, first = (" ".join(f.message.split()) for f in (other, same[0]))
    return f"; rank {other.rank.rank} said '{cut_to_difference(text, first, 80)}'"


def _words(failure: Failure) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", failure.message)  # addresses differ anyway


def _behind(run: Run, first: Failure, ranks: tuple[int, ...]) -> tuple[list[int], str]:
    """The others, where a rank failed before there was a group, or after it had destroyed its own,
    and its launcher ended them while they were still on their way; and to where they were."""
    rest = [r for r in run.ranks.values() if r.rank not in ranks]
    early = not any(r.of(InitEntered) or r.steps for r in (first.rank, *rest))
    over = (e.at for e in first.rank.of(GroupDestroyed) if not e.name)
    late = any(first.rank.wall(at) <= first.at for at in over)
    ended = all(r.ended and r.ended.by_launcher and not r.of(RankExiting) for r in rest)
    if not ended or not (early or late):
        return [], ""
    return [r.rank for r in rest], "to init_process_group" if early else "there"


def _cause(run: Run, first: Failure, ranks: tuple[int, ...], others: list[Failure]) -> str:
    behind = _behind(run, first, ranks)
    meant = translate(first.message)
    reported = f"the text means: {meant}" if meant else ""
    if first.kind_raised == "KeyboardInterrupt":
        reported = f"a SIGINT to {ranks_text(ranks)} alone, or the program itself, interrupted it"
    if first.kind_raised == QUIT:
        reported = (
            f"a `breakpoint()` was reached on {ranks_text(ranks)}, and the debugger was quit: by "
            "itself, where it finds no input, since ranks have no terminal of their own"
        )
    if first.kind == "exit" and raised_exit(first.rank):
        reported = f"{EXIT_RAISED}, ended it"
    if others:
        late = ranks_text([f.rank.rank for f in others])
        follow = f"it failed first; what {late} reported came after it"
        reported = f"{reported}; {follow}" if reported else follow
    if not reported and behind[0]:
        return (
            f"an error in the program itself; {ranks_text(behind[0])} had not come {behind[1]} "
            "when the launcher ended it, and may fail here as well"
        )
    if not reported and len(ranks) > 1:
        where = " at the same line" if first.location else ""
        if run.world_size > len(ranks):
            do = "fail" if first.exception else "leave like this"
            return f"these ranks {do}{where}, and no other was seen to"
        does = "fails" if first.exception else "leaves like this"
        return f"every one of these ranks {does}{where}: not a fault of one rank"
    return reported or "an error in the program itself; no other rank failed before"


def _fix(run: Run, first: Failure, ranks: tuple[int, ...], *, alike: bool) -> str:
    message = first.message
    if "address already in use" in message.lower():
        return "start with `--standalone`, or with `--rdzv-endpoint=localhost:0`"
    if "inLengthPerRank" in message:
        return (
            "let every rank expect what the others send: exchange the split sizes first, "
            "`dist.all_to_all_single(expected, sent)` with one number for each rank"
        )
    if "LOCAL_RANK" in message:
        return "start it with torchrun, and read `int(os.environ['LOCAL_RANK'])`"
    if first.kind_raised == QUIT:
        return (
            "take the `breakpoint()` out; to stop in one rank, call "
            f"`torch.distributed.breakpoint({ranks[0]})` on every rank: the others wait for it"
        )
    if first.kind_raised in NO_PYTHON:
        return "mend the text there: every rank that comes to it fails"
    read = "read the exception" if first.exception else "see what decides to leave here"
    if len(ranks) == run.world_size and not alike:
        return f"{read}: ranks have one each, so look at what they do not share (data, paths)"
    if len(ranks) == run.world_size:
        same = ": it is the same on every rank, and one process alone should show it as well"
        return read + (same if len(ranks) > 1 else "")
    if _behind(run, first, ranks)[0]:
        return f"{read}: one process alone may show it as well"
    named = ranks_text(ranks)
    if first.worker.startswith("DataLoader"):
        return (
            f"{read}: look at the samples of {named}'s share; `num_workers=0` shows it without "
            "a worker"
        )
    if first.kind_raised == "FileNotFoundError":
        return (
            f"{read}; if another rank writes the file, put `dist.barrier()` between that and the "
            f"read, else look for what differs on {named}: its share of the data, its paths"
        )
    return (
        f"{read}, then look for what differs on {named}: code that runs only there, its share of "
        "the data, its paths, its environment"
    )


def _received(first: Failure) -> tuple[Related, ...]:
    where = first.received
    if where is None or where == first.location:
        return ()
    return (Related(f"rank {first.rank.rank} got it from its {first.worker} here", where),)


def _traceback(first: Failure) -> Evidence:
    """The user's lines of a worker's traceback, which the rank's own does not have."""
    relayed = first.exception.relayed if first.exception else None
    lines = [f for f in relayed.frames if f.user] if relayed else []
    cwd = first.rank.cwd
    by = [
        f"{shorten(f.file, cwd)}:{f.line} in {f.function}"
        for f in lines
        if (f.file, f.line) != (lines[-1].file, lines[-1].line)
    ]
    return {"called_by": by} if by else {}


def _aftermath(first: float | None, others: list[Failure]) -> Evidence:
    """What the other ranks reported, equal ones folded, with the seconds after the first where it
    is known when that failed (the end of a process is seen a moment later)."""
    rows: dict[str, list[Failure]] = {}
    for f in others:
        text = f.rank.signal or "was told to end" if f.kind == "signal" else f.text
        rows.setdefault(text or "", []).append(f)
    if not rows:
        return {}
    return {
        "consequences": [
            {
                "ranks": fold_ranks(f.rank.rank for f in fs),
                "reported": cut(text, 160),
                **(
                    {}
                    if first is None
                    else {"seconds_later": round(max(0.0, min(f.at for f in fs) - first), 3)}
                ),
            }
            for text, fs in rows.items()
        ]
    }


def _named_by_torchrun(run: Run, ranks: tuple[int, ...]) -> Evidence:
    """The rank that torchrun, where it ran, calls the root cause: the first that ended badly."""
    ends = [
        e
        for node in run.nodes.values()
        for e in node.of(ProcessEnded)
        if e.attempt == run.attempt and not e.by_launcher and (e.status or e.signal)
    ]
    first = min(ends, key=lambda e: e.wall, default=None)
    if first is None or first.rank in ranks:
        return {}
    rank = run.ranks.get(first.rank)
    if rank is None or rank.started is None or rank.started.spawned:
        return {}
    if "TORCHELASTIC_RUN_ID" not in rank.started.environment:
        return {}
    return {"torchrun_names": f"rank {first.rank}, whose process was the first to end"}


def _reported_to_stop(failure: Failure) -> bool:
    """Whether the program ended by our `FaultFound`, or exited after it caught that."""
    if failure.exception and not failure.exception.caught:
        return failure.exception.kind == RAISED_BY_US
    return any(e.kind == RAISED_BY_US for e in failure.rank.of(ExceptionRaised))
