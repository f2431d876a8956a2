"""DDP603."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.waiting import failed_threads
from ddpdoctor.analysis.waiting.lock_wait import entering
from ddpdoctor.analysis.waiting.sent_signals import stopping
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import (
    Overdue,
    merged_stacks,
    missing,
    overdue,
    pending,
    victims,
    wait_lines,
    waiting_for,
)
from ddpdoctor.events import CallSite, InitEntered
from ddpdoctor.report.declarations import Effect, When, seen
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Severity
from ddpdoctor.run import Phase, Rank, Run, ranks_do, ranks_text, ranks_were


class RankMissing(Check):
    """A rank does not reach the collective in which the others wait

    ## What it finds
    Ranks that wait in a collective longer than the stall time for a rank that is somewhere else: in
    a loop, a sleep, a lock, a download, the `backward` of a custom function, or stopped by a
    signal; if a rank sent that signal, the line that did so is named. Also named are a thread of
    that rank that failed before, an exception that ended its program while a thread keeps the
    process, and a `with` block that it waits to enter while others wait
    inside.

    ## How it knows
    Each rank records every call before it makes it: ranks that wait in one are compared with those
    that have not begun it. The finding is made when that has lasted for the stall time:
    `--hang-after`, or else the largest of 10 s (30 s before training begins), three times the step
    time, and 1.5 times the longest pause so far that ended well. While all ranks are
    computing, the given time, or the 10 or 30 s, is six times as long. The node's monitor then
    takes the stacks, and the stack of the missing rank shows where it is. The finding is suspected;
    it is proven where the backend's own timeout ended the wait.

    ## Why it hurts
    Every other rank stands still, and after the backend's timeout the error is raised on the ranks
    that waited, not on the one that is late.

    ## How to fix it
    Look at the line where the missing rank is. If it is right and only slow (saving, evaluating,
    preparing data), raise `timeout=` of `init_process_group`, or let all ranks do it. A longer
    timeout does not help if the rank will never come: its program has ended, or it waits in
    `input()`.

    ## When it stays quiet
    - A pause shorter than the stall time.
    - Rank 0 saves or evaluates and comes back: the suspicion is withdrawn, and a pause of that
      length is expected from then on.
    """

    code = "DDP603"
    name = "rank-missing"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "lock": "the rank waits to enter a `with` block in which the others wait for it",
        "failed-thread": "a thread of the rank failed before",
        "ended": "the program of the rank has ended, and Python waits for its threads",
        "input": "the rank waits for a person to type something",
        "stopped": "a signal or a debugger stopped the rank",
        "busy": "the rank computes",
        "idle": "the rank waits and uses no CPU time",
        "node-silent": "the node of the rank has not been heard of any more",
        "unobserved": "what the rank does was not seen",
    }
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (Effect(("stall", "first-failure")), Effect(("rank-died",), when=(When.OTHER_RANKS,)))

    def examine(self, run: Run) -> Iterable[Finding]:
        now = snapshot_of(run)
        absent = [s for s in missing(now) if s.phase is not Phase.DATA]
        if absent and (why := overdue(run, now, absent)):
            yield self._report(run, now, absent, why)

    def _report(self, run: Run, now: Snapshot, absent: list[RankSnapshot], why: Overdue) -> Finding:
        waiting = [s for a in absent for s in waiting_for(now, a)]
        first = waiting[0]
        waited = max(s.still_s for s in waiting)
        times = {
            "time_to_verdict_s": round(waited, 2),
            "hang_after_s": round(now.hang_after, 1),
        }
        ranks = tuple(s.rank.rank for s in absent)
        call = first.made.place if first.made else "a collective"
        inside = absent[0].computes is not None  # in the same call, before it communicates
        call = f"the communication of {call}" if inside else call
        others = sorted({s.rank.rank for s in waiting})
        they_are = "it is" if len(ranks) == 1 else "they are"
        has_not = "has not" if len(ranks) == 1 else "have not"
        have = "has" if len(others) == 1 else "have"
        they_wait = f"{ranks_text(others)} {have} waited {now.waited(waiting):.0f} s"
        if not now.timed:
            they_wait = ranks_do(others, "wait")
        where = absent[0].location
        sender, sent, *_ = stopping(run, now, absent[0])
        thread = failed_threads.failed_thread(now, absent[0])
        block = entering(absent[0], waiting)
        return self.finding(
            rule="lock" if block else "failed-thread" if thread else _rule(absent[0]),
            ranks=ranks,
            confidence=Confidence.PROVEN if why is Overdue.TIMEOUT else Confidence.SUSPECTED,
            steps=absent[0].steps,
            subjects=(first.made.signature.op,) if first.made else (),
            location=sent or where or first.location,
            label=f"stops {ranks_text(ranks[:1])} here" if sent else _label(absent[0], ranks),
            related=(
                *failed_threads.failed_thread_line(thread, absent[0]),
                *(block.related if block else ()),
                *wait_lines(waiting),
            ),
            summary=f"{ranks_text(ranks)} {has_not} reached {call}, "
            f"where {they_wait}; "
            f"{they_are} {absent[0].doing}",
            cause=(block.cause if block else _cause(absent[0], why, sender))
            + failed_threads.failed_thread_remark(thread),
            fix=block.fix
            if block
            else failed_threads.FIX
            if thread is not None
            else _fix(absent[0], first, why, sender),
            fix_kind=FixKind.CHECK,
            evidence={
                "call_number": first.call.index if first.call else -1,
                "missing": ranks_text(ranks),
                **victims(now, waiting),
                "cpu_share_of_missing": absent[0].cpu,
                **(times if now.timed else {}),
                "stacks": merged_stacks(now),
                **({"flight_recorder": pending(now)} if inside else {}),
            },
            at=now.at - waited,
        )


def _rule(stand: RankSnapshot) -> str:
    if stand.rank.silent is not None:
        return "node-silent"
    if stand.stopped:
        return "stopped"
    if stand.stood is not None and stand.stood.joins_threads:
        return "ended"
    if _asks(stand):
        return "input"
    if stand.stood is None or stand.cpu is None:
        return "unobserved"
    return "busy" if stand.busy else "idle"


_TYPED = re.compile(r"\b(?:input|getpass)\(|\bstdin\b|\bbreakpoint\(|\bset_trace\(")
_PROMPTS = ("getpass.py", "pdb.py", "bdb.py", "cmd.py")
"""Modules of Python that read what a person types."""


def _asks(stand: RankSnapshot) -> bool:
    """Whether a rank waits, without computing, for what a person types."""
    stood = stand.stood
    if stood is None or stand.busy or not stood.frames:
        return False
    inner = stood.frames[0]
    if inner.user:
        return bool(_TYPED.search(inner.text))
    return inner.file.endswith(_PROMPTS)


def _label(stand: RankSnapshot, ranks: tuple[int, ...]) -> str:
    if not stand.location:
        return "never reached"
    if stand.surely:
        return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} here"
    return f"{ranks_were(ranks)} last seen here"


def _fix(stand: RankSnapshot, waiting: RankSnapshot, why: Overdue, sender: Rank | None) -> str:
    if stand.rank.silent is not None:
        return f"look at the node {stand.rank.silent.host} and at the network between the nodes"
    if stand.stopped and stand.stood is not None:
        node = f" on {stand.rank.node}" if stand.rank.node else ""
        if stand.stood.state == "t":
            return f"continue process {stand.stood.pid}{node} in the debugger that stopped it"
        find_out = (
            f"see why {ranks_text([sender.rank])} reaches the line above"
            if sender
            else "find out who stopped it"
        )
        return f"continue it with `kill -CONT {stand.stood.pid}`{node}, and {find_out}"
    if (rule := _rule(stand)) == "ended":
        failed = failed_threads.program_error(stand)
        join = "join these threads before exit, or create them with `daemon=True`"
        return f"correct the exception; {join}" if failed else join
    if rule == "input":
        return (
            "take the value from the command line or the environment: ranks have no terminal of "
            "their own"
        )
    op = waiting.made.signature.op if waiting.made else ""
    own = op == "monitored_barrier"  # it has a timeout of its own, not that of the group
    entered = waiting.rank.first(InitEntered)
    default = waiting.key is not None and waiting.key.name == "0"
    asked = entered.timeout_s if entered is not None and default and not own else -1.0
    than = f" (now {asked:g} s)" if why is Overdue.TIMEOUT and asked > 0 else ""
    return (
        "see what the line does on that rank; if it is right and only slow, raise the timeout"
        f"{than}: `{op if own else 'init_process_group'}(..., timeout=timedelta(hours=2))`"
    )


def _cause(stand: RankSnapshot, why: Overdue, sender: Rank | None) -> str:
    if stand.rank.silent is not None:
        return "the node has lost its power, its memory or its network, or was stopped as a whole"
    if stand.stopped:
        if stand.stood is not None and stand.stood.state == "t":
            return "a debugger stopped its process"
        if sender is not None:
            who = "the program" if sender is stand.rank else ranks_text([sender.rank])
            return f"its process is stopped by a signal that {who} sent"
        return "its process is stopped by a signal (`kill -STOP`, Ctrl-Z)"
    rule = _rule(stand)
    if rule == "ended" and stand.stood is not None:
        threads = ", ".join(sorted(stand.stood.threads))
        failed = failed_threads.program_error(stand)
        return (
            f"the program on that rank has ended{f' with {failed}' if failed else ''}, and Python "
            f"waits for its non-daemon threads{f': {threads}' if threads else ''}"
        )
    if rule == "input":
        return "it waits there for what a person types"
    what = "it computes there" if stand.busy else "it waits there and uses no CPU time"
    if stand.stood is None:
        what = "what it does there was not seen"
    elif stand.cpu is None:
        what = "whether it computes or waits there was not measured"
    if why is Overdue.TIMEOUT:
        return f"{what}; the backend's timeout ended the ranks that waited"
    return f"{what}; whether it will ever return cannot be seen from outside"
