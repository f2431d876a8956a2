"""After the run: how it ended, the report on it, and where the report is written."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..events import ProcessEnded
from ..report import environment, registry
from ..report.findings import Finding, Report
from ..report.postmortem import report_of
from ..run import Recording, Run
from ..run.merge_records import stopped_at, stopped_in
from ..storage.run_folder import RunFolder, RunInfo, printable, write_private

if TYPE_CHECKING:
    from ..config import Options

STOPPED_BY_DOCTOR = 4
FAIL_ON_REACHED = 3


def now() -> str:
    """The current time in the format of `run.json`."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def outcome(run: Run, status: int, stopped_by: str) -> str:
    """`completed | failed | hung | killed | incomplete`, from the ranks of the last attempt."""
    if stopped_by == "doctor" or (stopped_by and run.stall is not None):
        return "hung"
    ends = [
        e
        for node in run.nodes.values()
        for e in node.of(ProcessEnded)
        if e.attempt == run.attempt and not e.by_launcher
    ]
    stopped = _stopped_at(run)
    bad = [e for e in ends if (e.signal is not None or e.status) and e.wall < stopped]
    if bad:
        first = min(bad, key=lambda e: e.wall)
        if _gave_up(run, first.rank):
            return "hung"
        return "killed" if first.signal is not None else "failed"
    if stopped_by or stopped < math.inf:
        return "killed"
    seen = [r.ended for r in run.ranks.values() if r.ended]  # with what spawn saw of them
    if any(e.status and not e.by_launcher for e in seen):
        return "failed"
    states = {r.state for r in run.ranks.values()}
    signals = [e.signal for e in seen if e.signal is not None]
    # Without a signal on record, who else is gone may have been ended for what failed.
    for state in ("killed", "failed") if signals else ("failed", "killed"):
        if state in states:
            return state
    if status > 128:
        return "killed"
    return "failed" if status else "completed"


def _stopped_at(run: Run) -> float:
    """When somebody stopped the run, in seconds since the epoch; infinity if nobody did."""
    found = [math.inf]
    for node in run.nodes.values():
        stop, at = stopped_in(node, run.attempt), stopped_at(node, run.attempt)
        if stop is not None and at is not None and stop.by != "doctor":
            found.append(at)
    return min(found)


def _gave_up(run: Run, rank: int) -> bool:
    """Whether a rank failed with the timeout of its backend."""
    raised = run.ranks[rank].exception if rank in run.ranks else None
    texts = ("Timed out waiting", "collective operation timeout", "failed to pass monitoredBarrier")
    return raised is not None and any(text in raised.message for text in texts)


def examine(folder: RunFolder, options: Options, unsaved: RunInfo | None = None) -> Report:
    """The report on the last attempt, with the findings of earlier ones.

    Args:
        unsaved: how the run ended, if that could not be written to its folder.
    """
    checks = registry.select(options.select, options.ignore)
    recording = Recording(folder, fold=True)
    runs = [recording.refresh(attempt) for attempt in folder.attempts()]
    if unsaved is not None:
        runs[-1].info = unsaved
    return report_of(runs, checks, str(folder.path), options.unwanted())


def publish(folder: RunFolder, report: Report, options: Options, run: Run) -> None:
    """Write the report to all its destinations; one that fails does not prevent the others.

    Args:
        run: the records that are here, for pictures.
    """
    from .. import render

    saved = False
    with reported("findings.json"):
        write_private(folder.findings_path, report.to_json())
        saved = True
    stood = {r.rank: r.stood for r in report.ranks}
    for attempt in folder.attempts():
        for rank, path in folder.rank_files(attempt):
            with contextlib.suppress(OSError):  # it says what the report says
                _append_to_log(path.with_suffix(".log"), rank, report.findings, stood.get(rank, ""))
    _drop_empty_dumps(folder)
    render.console(report, stream=sys.stderr, quiet=options.quiet, saved=saved)
    if options.json:
        with reported(str(options.json)):
            render.write_json(report, options.json)
    if options.export:
        from .. import exporters

        for line in exporters.export(report, options.export, folder.path):
            say(line)
    if options.html:
        from ..render import page

        with reported(str(options.html)):
            page.write(report, options.html, run)
            if not options.quiet:  # the last line, where it is looked for
                _print(f"page: {printable(str(options.html))}")


def _drop_empty_dumps(folder: RunFolder) -> None:
    """Remove empty stack files: ranks open them in advance, and no stack was requested."""
    for attempt in folder.attempts():
        for path in folder.attempt_path(attempt).glob("rank-*.stacks.txt"):
            with contextlib.suppress(OSError):
                if not path.is_symlink() and path.stat().st_size == 0:
                    path.unlink()


def exit_status(training: int, stopped_by: str, report: Report | None, options: Options) -> int:
    """The first that applies: 4 if the doctor stopped the run, training's own, 3 if `--fail-on` was
    reached, 0."""
    if stopped_by == "doctor":
        return STOPPED_BY_DOCTOR
    if training:
        return training
    return FAIL_ON_REACHED if report and options.fails(report.worst()) else 0


def ended(info: RunInfo, run: Run, status: int, stopped_by: str) -> RunInfo:
    """`run.json` as it stands when all is over."""
    return msgspec.structs.replace(
        info,
        ended_at=now(),
        exit_code=status,
        outcome=outcome(run, status, stopped_by),
        world_size=run.world_size,
        torch=run.torch,
        machine=list(environment.describe(run)),
        stopped_by_doctor=stopped_by == "doctor",
    )


def say(text: str) -> None:
    """One line to the user; a closed stderr is no reason to fail."""
    _print(f"ddpdoctor: {printable(text)}")


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _append_to_log(
    path: os.PathLike[str], rank: int, findings: Sequence[Finding], stood: str = ""
) -> None:
    concerned = [f for f in findings if rank in f.ranks or not f.ranks]
    lines = ["", *([f"it stood {printable(stood)}"] if stood else ())]
    lines += ["findings that concern this rank:" if concerned else "no finding for this rank"]
    for f in concerned:
        lines += [
            f"  {f.severity.value}[{f.code}] {f.check}: {printable(f.summary)}{f.elsewhere}",
            f"    cause: {printable(f.cause)}",
            f"    fix: {printable(f.fix)}",
        ]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write("\n".join([*lines, ""]).encode(errors="replace"))


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Report that `what` could not be written, and continue."""
    try:
        yield
    except OSError as error:
        say(f"cannot save {what}: {error.strerror}")
