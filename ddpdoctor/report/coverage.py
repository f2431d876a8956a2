"""What the records of a run lack: ranks that were not observed, lines that were cut, and why."""

from __future__ import annotations

from collections.abc import Iterable

from ..events import (
    ExaminedInside,
    GroupReady,
    ProbeCost,
    ProbeTrouble,
    ProcessStarted,
    RankExiting,
    RankSample,
    StepDone,
    Stopped,
    TorchLoaded,
)
from ..run import Rank, Run, counted, ranks_text, ranks_were
from .findings import Unobserved

REACH = (
    "start Python without -I, -E and -S and pass PYTHONPATH and DDPDOCTOR_* on, or put "
    "@ddpdoctor.checkup on the training step"
)
REPORT_IT = "report this with the run folder"
DECORATE = "put @ddpdoctor.checkup on the training step"


def unobserved(run: Run) -> list[Unobserved]:
    """Ranks of which it is not known what they trained, grouped by the reason."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for number in run.missing:
        if (reason := _left_no_record(run, number)) is not None:
            reasons.setdefault(reason, []).append(number)
    for number, rank in run.ranks.items():
        if (reason := _saw_nothing(rank)) is not None:
            reasons.setdefault(reason, []).append(number)
    return [Unobserved(tuple(ranks), *reason) for reason, ranks in reasons.items()]


def _left_no_record(run: Run, rank: int) -> tuple[str, str] | None:
    """Why a rank of the world has no record, and what to do; None where nothing of the run has."""
    if run.left_behind:
        return (
            "nothing that it left behind was given, or could be read",
            "give its dump, its error file or its log as well",
        )
    if run.probe_error:
        return f"the doctor's probe could not be loaded there: {run.probe_error}", REPORT_IT
    if rank in run.unrecorded:
        return (
            "the probe was not loaded there (python -I, -E or -S, an environment without "
            "PYTHONPATH, or not a Python program), or the record was deleted or not copied to this "
            "folder",
            REACH,
        )
    if not run.ranks:
        return None
    if run.backend == "fake":
        return (
            "there is no such process, torch's backend `fake` only pretends that there is",
            "ranks are compared where a real backend is used",
        )
    started = (e for node in run.nodes.values() for e in node.of(ProcessStarted))
    if _ran_elsewhere(run) and not any(e.rank == rank for e in started):
        return (
            "no record, ran on another node",
            "type ddpdoctor report with the folders of all nodes",
        )
    return (
        "no record: it never started, or the probe was not loaded there (python -I, -E or -S, or "
        "an environment without PYTHONPATH)",
        f"read what the launcher printed, and {REACH}",
    )


def _ran_elsewhere(run: Run) -> bool:
    """Whether the run has other nodes: it was launched so, or each node on record has as many ranks
    as its launcher started there."""
    if run.info.nodes > 1:
        return True
    here: dict[str, set[int]] = {}
    asked: dict[str, int] = {}
    for number, rank in run.everyone.items():
        local = rank.started.environment.get("LOCAL_WORLD_SIZE", "") if rank.started else ""
        here.setdefault(rank.node, set()).add(number)
        asked[rank.node] = int(local) if local.isdecimal() else 0
    return bool(here) and all(0 < asked[node] <= len(ranks) for node, ranks in here.items())


def _saw_nothing(rank: Rank) -> tuple[str, str] | None:
    """Why the record of a rank says nothing of training, and what to do; None where it does."""
    broken = next((t for t in rank.of(ProbeTrouble) if t.part == "hooks" and t.lost), None)
    if broken is not None:
        reason = f"the doctor could not watch torch there ({broken.error})"
        return reason, REPORT_IT
    torch = rank.first(TorchLoaded)
    if torch is not None and torch.late:
        return (
            "torch was imported around the doctor's import hook and noticed only after "
            "init_process_group: what happened before is unknown",
            f"{DECORATE}, defined above init_process_group",
        )
    if torch or rank.first(GroupReady) or rank.steps:
        return None
    if rank.started is None:
        return (
            "the record is empty: the disk was full, or the rank was killed as it started",
            "free disk space and run again",
        )
    leaving = rank.latest(RankExiting)
    if leaving is not None and leaving.torch_imported:
        return "torch was imported around the doctor's import hook", DECORATE
    if rank.state == "running":
        return "torch has not been imported there yet", "read the report again later"
    if leaving is not None or rank.exception is not None:
        return (
            "torch was never imported there",
            "if the script starts the training as another process, pass the environment on to it",
        )
    if rank.exit_code is not None and not rank.torn:
        return (
            "nothing is on record after the start: the process replaced itself by another program "
            "(`os.exec*`) without passing its environment on, or was ended from native code",
            REACH,
        )
    return "the record ends before torch was imported", "read what the rank printed"


def lost(run: Run) -> list[str]:
    """What is missing from the records, in sentences."""
    lost = [f"{ranks_were(u.ranks)} not observed: {u.reason}; {u.help}" for u in unobserved(run)]
    if not run.ranks and not lost:
        lost.append(why_nobody(run))
    if run.others:
        lost.append(
            "this command formed several process groups in turn; "
            f"{counted(len(run.others), 'process', 'processes')} of the other groups are not "
            "covered here"
        )
    dropped = {r.rank: c.dropped for r in run.ranks.values() if (c := r.latest(ProbeCost))}
    if any(dropped.values()):
        ranks = [r for r, n in dropped.items() if n]
        lost.append(
            f"{ranks_text(ranks)} could not record {counted(sum(dropped.values()), 'event')}"
        )
    unreadable = {r.rank: r.unreadable for r in run.ranks.values() if r.unreadable}
    if unreadable:
        lines = sum(unreadable.values())
        lost.append(
            f"{counted(lines, 'unreadable line')} in the records of {ranks_text(unreadable)}"
        )
    lost += [facts.refused for facts in (*run.ranks.values(), *run.nodes.values()) if facts.refused]
    torn = [r for r in run.ranks.values() if r.torn]
    early = [r for r in torn if r.state in ("finished", "failed")]
    for where, ranks in _by_reach(run, early):
        lost.append(
            f"the records of {ranks_text(ranks)} stop early, in the middle of a line{where}: "
            "the disk was full, a file size limit was reached, or the files were truncated later; "
            "nothing is known of what came after"
        )
    for where, ranks in _by_reach(run, [r for r in torn if r not in early]):
        after = f"{where}: nothing is known of what came after" if where else ""
        lost.append(f"the last line in the records of {ranks_text(ranks)} is cut short{after}")
    parts: dict[str, list[int]] = {}
    for rank in run.ranks.values():
        for trouble in rank.of(ProbeTrouble):
            parts.setdefault(trouble.lost or trouble.part, []).append(rank.rank)
    monitors = [t for node in run.nodes.values() for t in node.of(ProbeTrouble)]
    lost += sorted({f"the monitor failed: {t.lost or t.error}" for t in monitors})
    failed = "an error in ddpdoctor itself on"
    lost += [f"{failed} {ranks_text(r)}; not observed: {what}" for what, r in parts.items()]
    return lost


def _by_reach(run: Run, ranks: Iterable[Rank]) -> list[tuple[str, list[int]]]:
    """Ranks whose records are cut, with the step where those end if it went on, or another did."""
    most = max((r.steps for r in run.ranks.values()), default=0)
    found: dict[str, list[int]] = {}
    for rank in ranks:
        recorded = max(
            (e.step + 1 for e in rank.of(StepDone)), default=0
        )  # the ring may know of more
        behind = recorded < most - 1  # by one is a rank that died
        where = f", at step {recorded} of {most}" if behind else ""
        found.setdefault(where, []).append(rank.rank)
    return list(found.items())


def why_nobody(run: Run) -> str:
    """Why a run has no rank on record."""
    if not run.nodes and run.info.launcher in ("run", "exec"):  # whose monitor writes at once
        return (
            "the records are gone: the run folder, or what was in it, was deleted or moved while "
            "the run went on, or later"
        )
    if run.probe_error:
        return f"the doctor's probe could not be loaded: {run.probe_error}; {REPORT_IT}"
    if seen := {e.rank for node in run.nodes.values() for e in node.of(RankSample)}:
        return (
            f"{ranks_text(seen)} ran, and what each recorded (rank-*.jsonl) is gone: deleted or "
            "moved, or not copied to this folder"
        )
    if run.info.launcher == "run":
        return _no_rank_started(run)
    inside = (e.folder for node in run.nodes.values() for e in node.of(ExaminedInside))
    if folder := next(inside, ""):
        return (
            "the ranks of this command were examined by another ddpdoctor, which it starts: type "
            f"ddpdoctor report {folder}"
        )
    return (
        "no Python process of this command was a rank: none had RANK in its environment or called "
        "init_process_group, or the probe was not loaded there (`python -I`, `-E` or "
        f"`-S`; `env -i`, `sudo`, a container, another machine: no PYTHONPATH); {REACH}"
    )


def _no_rank_started(run: Run) -> str:
    """torchrun says why only where it ends by itself."""
    then = ", which it does once the other nodes are there" if run.info.nodes > 1 else ""
    if run.info.exit_code is None:
        return f"torchrun had started no rank when these records end{then}"
    if run.info.exit_code > 128 or any(node.of(Stopped) for node in run.nodes.values()):
        return f"torchrun was ended before it had started a rank{then}"
    return "torchrun started no rank; what it printed says why"
