"""What the ranks recorded differently before a finding: its reason, or a pointer to it."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

import msgspec

from ..analysis.rank_differences import Difference, preceding
from ..events import Unwrapped, Wrapped
from ..run import Rank, Run, State
from .findings import Finding, Severity

EXPLAINED = frozenset({"drift", "hang", "data", "launch"})
"""Families of checks whose faults begin on some ranks."""


def with_differences(run: Run, findings: list[Finding], families: dict[str, str]) -> list[Finding]:
    """The findings with what the ranks recorded differently before them (`Finding.differed`).

    Args:
        families: of each check, by its name.
    """
    asked = [f for f in findings if _asks(f, families)]
    if not asked or len(run.ranks) < 2 or not _same_program(run):
        return findings
    found = preceding(list(run.ranks.values()), inf)
    return [
        msgspec.structs.replace(f, differed=_first(f, _reasons(run, f, families, found)))
        if f in asked
        else f
        for f in findings
    ]


def _reasons(
    run: Run, finding: Finding, families: dict[str, str], found: list[Difference]
) -> list[Difference]:
    """Without what, of a hang, only some ranks did after the last call that all have returned from:
    that is what it looks like when ranks go different ways, and not why they do."""
    if families.get(finding.check) != "hang" or not finding.at:
        return found
    since = min(_returned(rank, finding.at) for rank in run.ranks.values())
    return [d for d in found if d.field or d.at < since]


def _returned(rank: Rank, before: float) -> float:
    """When a rank last returned from a call, on the run's clock; infinity where it is unknown."""
    calls = rank.ring.calls if rank.ring is not None else ()
    ends = [rank.wall(c.ended) for c in calls if c.ended and c.state is State.DONE]
    return max((end for end in ends if end < before), default=inf)


def _asks(finding: Finding, families: dict[str, str]) -> bool:
    return finding.severity is not Severity.NOTE and families.get(finding.check) in EXPLAINED


def _same_program(run: Run) -> bool:
    """Whether all ranks train the same kinds of models: stages of a pipeline differ by design."""
    kinds = {
        frozenset([e.kind for e in rank.of(Wrapped)] + [e.kind for e in rank.of(Unwrapped)])
        for rank in run.ranks.values()
    }
    return len(kinds - {frozenset()}) < 2


def _first(finding: Finding, found: Collection[Difference]) -> str:
    """The first difference before a finding that it does not speak of itself."""
    earlier = [d for d in found if not finding.at or d.at < finding.at]
    return "" if not earlier or _told(finding, earlier[0]) else earlier[0].text


def _told(finding: Finding, difference: Difference) -> bool:
    """Whether the finding speaks of this: in its words, or by pointing at its line."""
    shown = {finding.location, *(r.location for r in finding.related)}
    lines = {(at.file, at.line) for at in shown if at is not None}
    words = f"{finding.summary} {finding.cause}"
    here = any((at.file, at.line) in lines or str(at) in words for at in difference.lines.values())
    values = [str(v) for v in difference.values.values() if v is not None and v is not True]
    # Small numbers stand in any sentence.
    said = bool(values) and all(len(v) > 2 and v in words for v in values)
    return here or difference.text in words or said
