"""What `ddpdoctor attach` prints: who stands where, then what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..render import findings_text, grid_text, streams
from ..render.safe_text import clean
from ..report.findings import Finding
from ..run import fold_ranks, ranks_do, ranks_text
from .own import is_own, short
from .records import JobLook, Look
from .stands import Stand, classes, stand_of
from .verdict import judge

MOST_FRAMES = 6
STATES = {"T": "stopped", "t": "traced", "Z": "zombie", "": "gone", "D": "in the kernel"}


def show(seen: Sequence[JobLook]) -> None:
    """Print jobs to stdout, one after the other."""
    width, styled = streams.width_of(sys.stdout), streams.is_terminal(sys.stdout)
    streams.emit("\n".join(page(j, judge(j), width, styled=styled) for j in seen), sys.stdout)


def page(job: JobLook, findings: Sequence[Finding], width: int, *, styled: bool = False) -> str:
    """A job as text of that width."""
    stands = [stand_of(rank) for rank in job.ranks]
    world = job.world_size or len(job.ranks)
    head = [
        clean(job.command),
        f"{len(job.ranks)} of {world} ranks on {clean(job.node)}, looked at "
        + (f"{job.looks} times in" if job.looks > 2 else "twice,")
        + f" {job.apart_s:.1f} s"
        + ("" if job.looks > 2 else " apart"),
        "",
    ]
    rows = [_row(same) for same in classes(stands)]
    table = grid_text(("ranks", "state", "cores", "moved", "where"), rows, width, styled=styled)
    stacks = [line[:width] for same in classes(stands) for line in _stack(same)]
    body = findings_text(findings, width, styled=styled, whole=True)
    if not findings:
        body = _nothing(stands)
    return "\n".join([*head, table.rstrip(), *stacks, "", body])


def _nothing(stands: Sequence[Stand]) -> str:
    """What is said where nothing is wrong."""
    if any(s.moved for s in stands):
        return "no rank waits for another: what moves, goes on\n"
    if active := [s.rank.rank for s in stands if s.goes_on]:
        do = ranks_do(active, "compute")
        return f"no rank was seen to wait for another: {do}, or wakes again and again\n"
    return "no rank was seen to wait for another\n"


def _row(same: Sequence[Stand]) -> tuple[str, ...]:
    first = same[0]
    cores = [s.rank.cpu for s in same]
    spread = f"{min(cores):.1f}" if max(cores) - min(cores) < 0.05 else (
        f"{min(cores):.1f}-{max(cores):.1f}")  # fmt: skip
    moved = sum(s.moved for s in same)
    state = STATES.get(first.rank.state, "alive")
    gpu = f", GPU {first.rank.gpu:.0f} %" if first.rank.gpu is not None else ""
    return (
        fold_ranks(s.rank.rank for s in same),
        state + gpu,
        spread,
        "no" if not moved else "yes" if moved == len(same) else f"{moved} of {len(same)}",
        first.where + (f" in thread {first.thread.name}" if first.thread else ""),
    )


def _stack(same: Sequence[Stand]) -> list[str]:
    """The program's own frames of a class, and those of threads that tell more."""
    ranks = ranks_text(s.rank.rank for s in same)
    lines = _frames(ranks, same[0].rank.looks)
    for thread in same[0].threads:
        lines += _frames(f"{ranks}, thread {clean(thread.name)}", thread.looks)
    return lines


def _frames(title: str, looks: Sequence[Look]) -> list[str]:
    """The program's own frames of a stack, innermost first."""
    own = [f for f in looks[-1].frames if not is_own(f.file)] if looks else []
    if not own:
        return []
    lines = [
        f"  {clean(f'{short(f.file)}:{f.line} in {f.function}   {f.source}')}"
        for f in own[:MOST_FRAMES]
    ]
    more = [f"  … {len(own) - MOST_FRAMES} more"] if len(own) > MOST_FRAMES else []
    return ["", title, *lines, *more]
