"""Findings of one fault, made one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .findings import Evidence, Finding


def merged(
    findings: Sequence[Finding], note: str = "", evidence: Evidence | None = None
) -> Finding:
    """The first finding, with the ranks, subjects and optimizers of all.

    Args:
        note: added to its summary.
        evidence: added to its evidence.
    """
    first = findings[0]
    return msgspec.structs.replace(
        first,
        ranks=tuple(sorted({r for f in findings for r in f.ranks})),
        subjects=tuple(dict.fromkeys(s for f in findings for s in f.subjects)),
        optimizers=tuple(sorted({n for f in findings for n in f.optimizers})),
        summary=first.summary + (f"; {note}" if note else ""),
        evidence=first.evidence | (evidence or {}),
    )


def each_once(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one check, severity and ranks at one line (a loader made in every epoch) are one
    finding; those without a line are one where subjects and summary are equal."""
    same: dict[object, list[Finding]] = {}
    for f in findings:
        what = f.location or (f.subjects, f.summary)
        same.setdefault((f.code, f.severity, f.ranks, what), []).append(f)
    return [_at_one_line(several) for several in same.values()]


def _at_one_line(several: list[Finding]) -> Finding:
    first = several[0]
    more = list(dict.fromkeys(f.summary for f in several if f.summary != first.summary))
    return merged(several, evidence={"from the same line also": more}) if more else first
