"""DDP606."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.divergence.faults import NEVER_CREATED
from ddpdoctor.analysis.waiting.error_words import PORT_IN_USE, remedy, translate
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
    unseen,
)
from ddpdoctor.analysis.waiting.lone_load import NOT_LOADED, LoneLoad, lone_load
from ddpdoctor.analysis.waiting.missing_file import ADVICE, missing_file
from ddpdoctor.analysis.waiting.missing_name import NEVER_SET, MissingName, missing_name
from ddpdoctor.events import (
    ExceptionRaised,
    GroupDestroyed,
    InitEntered,
    ProcessEnded,
    RankExiting,
    SpawnFailed,
)
from ddpdoctor.report.declarations import WAITING, Condition, Effect, When
from ddpdoctor.report.errors import error_kinds
from ddpdoctor.report.evidence_names import MESSAGE
from ddpdoctor.report.findings import Check, Evidence, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Run, fold_ranks, ranks_text, shorten, silence_text, silences

RAISED_BY_US = "ddpdoctor.FaultFound"
QUIT = "bdb.BdbQuit"
NO_PYTHON = ("SyntaxError", "IndentationError", "TabError")


NOBODY = "; no rank was seen to fail on its own"
LOST_PEERS = "lost-peers"
"""Rule of a finding that is itself a consequence: no rank was seen to fail on its own."""


_OWN = Condition(
    "unless the cause is itself a consequence",
    lambda mine, _: mine.severity is Severity.ERROR and mine.rule != LOST_PEERS,
)


class FirstFailure(Check):
    """The rank that failed first; the errors of the others follow from it

    ## What it finds
    Of all ranks that failed, the first that failed *on its own*: an exception in its code or an
    exit status of its own; also a process that `torch.multiprocessing.spawn` started with the ranks
    but that is no rank, where it raised. Connection errors and timeouts on other ranks are listed
    as consequences; the same exception on several ranks is reported once. For a file that a rank
    did not find, it says where another rank wrote it, if each built the path from the clock or at
    random; for a call that is given an optimizer whose state only other ranks loaded, where.

    ## How it knows
    Each rank records the exceptions that leave its program, that it handles while it exits with a
    non-zero status, or that it logged or printed (`traceback`) just before, with no call since; and
    when the call failed that raised them. The launcher and the node's monitor record how processes
    end. Failures of all ranks are ordered by these times; errors of torch about a lost connection
    or a timeout count as consequences, and so does what is raised while handling one of these. For
    a syntax error it shows the line that could not be parsed, for a debugger that was quit the
    `breakpoint()` before. The finding is proven.

    ## Why it hurts
    When one rank fails, the others lose their connections and fail too, some before it is even
    noticed. torchrun names the process that ended first, which is often one that only waited.

    ## How to fix it
    Look at the exception and the line given here, not at the connection errors of the other ranks.

    ## When it stays quiet
    - A run that ends well, or that somebody stopped.
    - An abort at teardown, after the program has ended and in none of its lines, is only a note:
      torch does that occasionally.
    """

    code = "DDP606"
    name = "first-failure"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "exception": "a rank raised an exception first",
        "worker-exception": "a DataLoader worker of a rank raised first",
        NEVER_SET: "a rank uses a name that is set only under a condition that did not hold there",
        NOT_LOADED: "other ranks loaded the state of the optimizer that the failing call is given",
        "rank-specific-path": "a rank did not find a file that another wrote under its own path",
        "exit-status": "a rank exited with a non-zero status first, without an exception",
        "other-moment": "a file is not there yet, or any more, as another rank writes or moves it",
        "removed-twice": "several ranks remove a file or folder, and one no longer finds it",
        "made-twice": "several ranks make a folder, and one finds it there already",
        "unrecorded": "a process without any record ended first",
        "spawned-process": "a process that `spawn` started, which is no rank, raised first",
        LOST_PEERS: "ranks only lost their peers; none was seen to fail on its own",
        "teardown-abort": "a process aborted in native code after the program had ended",
    }
    effects = (
        # A worker that died is why its own rank raised.
        Effect(("data-stall",), when=(_OWN, When.OTHER_RANKS)),
        Effect((*WAITING, "rank-died", "rendezvous-stall"), when=(_OWN,)),
        Effect(("group-creation-mismatch",), rules=(NEVER_CREATED,), when=(_OWN,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        found = failures(run)
        aborts = [f for f in found if f.kind == "signal" and at_teardown(run, f)]
        rest = [f for f in found if f not in aborts]
        own = [f for f in rest if f.kind in ("exception", "exit")]
        died = [f for f in rest if f.kind == "signal"]
        lost = [f for f in rest if f.kind == "lost"]
        first = next(iter(unseen(run)), None)
        if first and first.at < min((f.at for f in (*own, *died)), default=math.inf):
            if first.kind == "exit":  # a signal is reported by rank-died
                yield self._report_unseen(first, [*own, *lost, *died])
            return
        if spawned := spawn_failed(run):
            raised, ended = spawned
            if raised.wall < min((f.at for f in own), default=math.inf):
                yield self._report_spawned(raised, [*own, *lost, *ended])
                return
        if died and (not own or died[0].at < own[0].at):
            return  # reported by rank-died
        if own and _reported_to_stop(own[0]):
            return  # `raise_on` asked for it: the failure is the finding that it carries
        if own:
            yield self._report(run, own, [*lost, *died])
        elif lost:
            yield self._report_lost(run, lost)
        elif aborts:
            yield self._report_abort(run, aborts)

    def _report(self, run: Run, own: list[Failure], followers: list[Failure]) -> Finding:
        first = own[0]
        same = [f for f in own if f.signature == first.signature]
        ranks = tuple(sorted(f.rank.rank for f in same))
        step = step_of(first)
        at_step = "" if step is None else f"at step {step}, "
        others = [f for f in own if f not in same] + followers
        message = first.message
        what = first.kind_raised if first.exception else first.text
        missing = missing_file(run, first)
        known = missing_name(first) or lone_load(run, first, ranks)
        about, alike = missing or known, _other_text(same) is None
        if first.worker:
            summary = f"{at_step}{first.text}, raised in {first.worker} of {ranks_text(ranks)}"
        elif first.exception:
            summary = f"{at_step}{ranks_text(ranks)} raised {first.text}{_caught(first)}"
            summary += f" while handling {first.before}" if first.before else ""
            summary += _in_other_words(same)
        else:
            summary = f"{at_step}{ranks_text(ranks)} ended with {first.text}"
        return self.finding(
            rule=missing.rule if missing else _rule(first, known),
            deadlocked=left_waiting(run, ranks),
            ranks=ranks,
            steps=None if step is None else Steps.of([step]),
            subjects=(what,),
            location=first.location,
            label=_label(first),
            related=_received(first) + (about.related if about else ()),
            summary=summary,
            cause=missing.cause if missing else _cause(run, first, ranks, others, known),
            fix=missing.fix if missing else _fix(run, first, ranks, known, same_text=alike),
            fix_kind=FixKind.CHECK,
            evidence={
                MESSAGE: message[:2000],
                **({f"{missing.did}_by_another_rank": missing.path} if missing else {}),
                **_traceback(first),
                **_aftermath(None if run.left_behind else first.at, others),
                **_named_by_torchrun(run, ranks),
            },
            errors=error_kinds(message),
            at=first.at,
        )

    def _report_lost(self, run: Run, lost: list[Failure]) -> Finding:
        first = lost[0]
        message = first.exception.message if first.exception else ""
        silent = ", ".join(silence_text(event) for event in silences(run.nodes.values()))
        ranks = tuple(sorted(f.rank.rank for f in lost))
        return self.finding(
            rule=LOST_PEERS,
            ranks=ranks,
            subjects=(first.exception.kind,) if first.exception else (),
            location=first.location,
            label="waited here",
            summary=f"{ranks_text(ranks)} lost the connection to other ranks: {first.text}",
            cause=(translate(message) or "another rank exited or did not arrive")
            + (f"; {silent}" if silent else NOBODY),
            fix="look at what became of that node: its power, memory and network"
            if silent
            else "look at the ranks not named here, and at the network between them",
            fix_kind=FixKind.CHECK,
            evidence={MESSAGE: message[:2000]},
            errors=error_kinds(message),
            at=first.at,
        )

    def _report_abort(self, run: Run, aborts: list[Failure]) -> Finding:
        ranks = tuple(sorted(f.rank.rank for f in aborts))
        ended = [r for r in run.ranks.values() if r.signal == "SIGTERM" and not is_done(r)]
        others = ranks_text(r.rank for r in ended)
        cut_off = f"{others} was terminated because of it, before it was seen to finish"
        return self.finding(
            rule="teardown-abort",
            severity=Severity.NOTE,
            ranks=ranks,
            subjects=(aborts[0].rank.signal or "",),
            summary=f"{ranks_text(ranks)} died of {aborts[0].rank.signal} at teardown, after "
            f"all {'its ' if ended else ''}work was done",
            cause="torch's threads still run while the interpreter shuts down; "
            + (cut_off if ended else "results and checkpoints are complete"),
            fix="end the program with `dist.barrier()` and `dist.destroy_process_group()`",
            fix_kind=FixKind.TEMPLATE,
            evidence={"signal": aborts[0].rank.signal, "steps": aborts[0].rank.steps},
            at=aborts[0].at,
        )

    def _report_unseen(self, first: Failure, followers: list[Failure]) -> Finding:
        """A rank without any record ended with an error before any other."""
        late = ranks_text(f.rank.rank for f in followers)
        follow = f"; the errors of {late} follow from it" if followers else ""
        return self.finding(
            rule="unrecorded",
            ranks=(first.rank.rank,),
            summary=f"rank {first.rank.rank} ended first, with {first.text}",
            cause="there is no record of this process (the probe did not reach it, or its files "
            f"are gone), so its exception is not known{follow}",
            fix="look at its output: `--log-dir logs --redirects 3` writes one file per rank",
            fix_kind=FixKind.TEMPLATE,
            evidence={"status": first.status, **_aftermath(None, followers)},
            at=first.at,
        )

    def _report_spawned(self, raised: SpawnFailed, followers: list[Failure]) -> Finding:
        """A process that was spawned together with the ranks, but is no rank, raised."""
        cwd = followers[0].rank.cwd
        spots = [Location(shorten(f.file, cwd), f.line, f.function, f.text) for f in raised.frames]
        lines = raised.message.strip().splitlines()
        what = cut(": ".join((raised.kind, *lines[:1])), 200)
        late = ranks_text(f.rank.rank for f in followers)
        return self.finding(
            rule="spawned-process",
            ranks=(),
            subjects=(raised.kind,),
            location=spots[-1] if spots else None,
            label="raised here",
            summary=f"process {raised.index} of the {raised.count} that "
            f"`torch.multiprocessing.spawn` started, in no process group, raised {what}",
            cause="it failed first, and `torch.multiprocessing.spawn` then terminated all other "
            f"processes: the ends of {late} follow from it",
            fix="read the exception",
            fix_kind=FixKind.CHECK,
            evidence={MESSAGE: raised.message[:2000], **_aftermath(raised.wall, followers)},
            errors=error_kinds(raised.message),
            at=raised.wall,
        )


Known = MissingName | LoneLoad | None
"""What on record explains an exception."""


def _rule(first: Failure, known: Known) -> str:
    if first.worker:
        return "worker-exception"
    if known is not None:
        return known.rule
    return "exception" if first.exception else "exit-status"


def _label(first: Failure) -> str:
    if first.kind_raised == QUIT:
        return "stopped in the debugger here"
    return "raised here" if first.exception else "exited here"


def _caught(first: Failure) -> str:
    if first.exception is None or not first.exception.caught:
        return ""
    return f", caught it and exited with status {first.status}"


def _other_text(same: list[Failure]) -> Failure | None:
    """A rank that raised the same exception on the same line with another text; None for none."""
    return next((f for f in same if _words(f) != _words(same[0])), None)


def _in_other_words(same: list[Failure]) -> str:
    """The text of such a rank, as a clause; empty for none."""
    other = _other_text(same)
    if other is None:
        return ""
    text, first = (" ".join(f.message.split()) for f in (other, same[0]))
    return f"; on rank {other.rank.rank}: '{cut_to_difference(text, first, 80)}'"


def _words(failure: Failure) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", failure.message)  # addresses always differ


def _behind(run: Run, first: Failure, ranks: tuple[int, ...]) -> tuple[list[int], str]:
    """The ranks that the launcher ended while they were still on their way, and where to: where a
    rank failed before there was a group, or after it had destroyed its own."""
    if run.left_behind:
        return [], ""  # where the others were is not on record
    rest = [r for r in run.ranks.values() if r.rank not in ranks]
    early = not any(r.of(InitEntered) or r.steps for r in (first.rank, *rest))
    over = (e.at for e in first.rank.of(GroupDestroyed) if not e.name)
    late = any(first.rank.wall(at) <= first.at for at in over)
    ended = all(r.ended and r.ended.by_launcher and not r.of(RankExiting) for r in rest)
    if not ended or not (early or late):
        return [], ""
    return [r.rank for r in rest], "to init_process_group" if early else "there"


def _cause(
    run: Run, first: Failure, ranks: tuple[int, ...], others: list[Failure], known: Known
) -> str:
    behind = _behind(run, first, ranks)
    meaning = translate(first.message)
    text = f"the message means: {meaning}" if meaning else ""
    if first.kind_raised == "KeyboardInterrupt":
        text = f"interrupted by a SIGINT to {ranks_text(ranks)} alone, or by the program itself"
    if first.kind_raised == QUIT:
        text = (
            f"{ranks_text(ranks)} reached a `breakpoint()`, and the debugger was quit; it quits on "
            "its own without input, and ranks have no terminal of their own"
        )
    if known is not None:
        text = known.cause(ranks)
    if first.kind == "exit" and raised_exit(first.rank):
        text = f"{EXIT_RAISED}, ended it"
    if others:
        late = ranks_text([f.rank.rank for f in others])
        follow = f"it failed first; the errors of {late} follow from it"
        text = f"{text}; {follow}" if text else follow
    if text:
        return text
    if behind[0]:
        return (
            f"an error in the program itself; {ranks_text(behind[0])} had not come {behind[1]} "
            "when the launcher ended it, and may fail here as well"
        )
    if len(ranks) > 1:
        where = " on the same line" if first.location else ""
        if run.world_size > len(ranks):
            do = "fail" if first.exception else "exit like this"
            return f"these ranks {do}{where}; no other rank was seen to"
        does = "fail" if first.exception else "exit like this"
        return f"all of these ranks {does}{where}: it is not the fault of one rank"
    return "an error in the program itself; no other rank failed before"


def _fix(run: Run, first: Failure, ranks: tuple[int, ...], known: Known, *, same_text: bool) -> str:
    message = first.message
    if PORT_IN_USE.search(message):
        return _port_fix(run, first, ranks)
    if (remedied := remedy(message)) and first.exception:
        return remedied
    if known is not None:
        return known.fix
    if "LOCAL_RANK" in message:
        return "launch with torchrun, and read `int(os.environ['LOCAL_RANK'])`"
    if first.kind_raised == QUIT:
        return (
            "remove the `breakpoint()`; to debug one rank, call "
            f"`torch.distributed.breakpoint({ranks[0]})` on every rank: the others wait for it"
        )
    if first.kind_raised in NO_PYTHON:
        return "correct the syntax: every rank that imports it fails"
    read = "read the exception" if first.exception else "see why the program exits here"
    if len(ranks) == run.world_size and not same_text:
        return f"{read}: each rank has its own, so look at what they do not share (data, paths)"
    if len(ranks) == run.world_size:
        same = ": it is the same on every rank, so it can most likely be reproduced with a single "
        same += "process"
        return read + (same if len(ranks) > 1 else "")
    if _behind(run, first, ranks)[0]:
        return f"{read}: it may also occur with a single process"
    named = ranks_text(ranks)
    if first.worker.startswith("DataLoader"):
        return (
            f"{read}: look at the samples in the shard of {named}; `num_workers=0` reproduces it "
            "without a worker"
        )
    if advice := ADVICE.get(first.kind_raised):
        return f"{read}; {advice.format(named=named)}"
    return (
        f"{read}, then look for what differs on {named}: code that runs only there, its data "
        "shard, its paths, its environment"
    )


def _port_fix(run: Run, first: Failure, ranks: tuple[int, ...]) -> str:
    """What to do about a port that is taken: that of the process group, or one of the program's
    own."""
    if first.while_joining:
        if first.rank.started is not None and first.rank.started.spawned:
            return (
                "choose a free port once, in the process that starts the ranks, and give all of "
                "them the same one as MASTER_PORT"
            )
        return "start with `--standalone`, or with `--rdzv-endpoint=localhost:0`"
    if len(ranks) == run.world_size:
        return "use another port here, or end the process that has it"
    return (
        "only one process on a machine can have the port: if every rank runs this line, run it on "
        "one of them (`if rank == 0:`), or use another port on each (`port + rank`)"
    )


def _received(first: Failure) -> tuple[Related, ...]:
    where = first.received
    if where is None or where == first.location:
        return ()
    return (Related(f"rank {first.rank.rank} received it from its {first.worker} here", where),)


def _traceback(first: Failure) -> Evidence:
    """The user's lines in the traceback of a worker, which the rank's traceback lacks."""
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
    """What the other ranks reported, equal texts as one row.

    Args:
        first: when the first rank failed, in seconds since the epoch; None where that is not known
            (the end of a process is seen a moment later).
    """
    rows: dict[str, list[Failure]] = {}
    for f in others:
        text = f.rank.signal or "terminated" if f.kind == "signal" else f.text
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
    """The rank that torchrun calls the root cause, if it is another one: the first whose process
    ended with an error."""
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
    return {"torchrun_names": f"rank {first.rank}, whose process ended first"}


def _reported_to_stop(failure: Failure) -> bool:
    """Whether ddpdoctor's `FaultFound` ended the program, or it exited after catching that."""
    if failure.exception and not failure.exception.caught:
        return failure.exception.kind == RAISED_BY_US
    return any(e.kind == RAISED_BY_US for e in failure.rank.of(ExceptionRaised))
