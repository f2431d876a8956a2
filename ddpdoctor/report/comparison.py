"""What changed between two runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..run import some
from .findings import Finding, RankState, Report
from .postmortem import fault_key

_NAMED_CHECKS = 6
_IDENTITY = frozenset({"rank", "local_rank", "pid", "exit_code"})
"""Numbers of `RankState` that say who a rank is, not how it did."""


@dataclass(frozen=True)
class Figure:
    """A number that both runs have, over their ranks."""

    name: str
    before: float
    after: float
    worst_before: float
    worst_after: float

    @property
    def ratio(self) -> float | None:
        """Of the medians, None where there was nothing before."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side. `stayed` holds the newer run's findings."""

    before: Report
    after: Report
    appeared: tuple[Finding, ...]
    went: tuple[Finding, ...]
    stayed: tuple[Finding, ...]
    figures: tuple[Figure, ...]
    unlike: tuple[str, ...]


def compare(before: Report, after: Report) -> Comparison:
    """Pair the findings, first those that are equal, then those whose line only moved."""
    went, appeared = list(before.findings), list(after.findings)
    stayed: list[Finding] = []
    for key in (fault_key, _moved):
        for finding in list(appeared):
            twin = next((f for f in went if key(f) == key(finding)), None)
            if twin is not None:
                went.remove(twin)
                appeared.remove(finding)
                stayed.append(finding)
    stayed.sort(key=after.findings.index)
    return Comparison(
        before,
        after,
        tuple(appeared),
        tuple(went),
        tuple(stayed),
        tuple(_figures(before, after)),
        tuple(_unlike(before, after, appeared, went)),
    )


def _moved(finding: Finding) -> tuple[object, ...]:
    place = finding.location
    if finding.subjects:
        return finding.code, finding.subjects
    return finding.code, (place.file, place.function) if place else None


def _figures(before: Report, after: Report) -> list[Figure]:
    figures = []
    for field in msgspec.structs.fields(RankState):
        old, new = _values(before, field.name), _values(after, field.name)
        if field.name not in _IDENTITY and old and new:
            median = statistics.median
            figures.append(Figure(field.name, median(old), median(new), max(old), max(new)))
    if before.overhead.measured_percent is not None and after.overhead.measured_percent is not None:
        a, b = before.overhead.measured_percent, after.overhead.measured_percent
        figures.append(Figure("overhead_percent", a, b, a, b))
    return figures


def _values(report: Report, name: str) -> list[float]:
    unknown = {rank for u in report.coverage.unobserved for rank in u.ranks}
    values = [getattr(r, name) for r in report.ranks if r.rank not in unknown]
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _unlike(
    before: Report, after: Report, appeared: list[Finding], went: list[Finding]
) -> list[str]:
    """What makes the two runs hard to compare."""
    reasons = []
    parts: tuple[tuple[str, Callable[[Report], object]], ...] = (
        ("world size", lambda r: r.run.world_size),
        ("torch", lambda r: r.run.torch),
        ("backend", lambda r: r.run.backend),
        ("outcome", lambda r: r.run.outcome),
    )
    for name, read in parts:
        old, new = read(before), read(after)
        if old != new:
            reasons.append(f"{name}: {old or 'unknown'} before, {new or 'unknown'} after")
    unseen = set(before.coverage.examined) - set(after.coverage.examined)
    if maybe := sorted({f.check for f in went} & unseen):
        reasons.append(f"not examined after, and may still be there: {some(maybe, _NAMED_CHECKS)}")
    if rest := sorted(unseen - {*maybe}):
        reasons.append(f"examined before, not after: {some(rest, _NAMED_CHECKS)}")
    if new := sorted({f.check for f in appeared} - set(before.coverage.examined)):
        reasons.append(f"not examined before, and may have been there: {some(new, _NAMED_CHECKS)}")
    for when, report in (("before", before), ("after", after)):
        reasons += [f"records {when}: {text}" for text in report.coverage.lost]
    return reasons
