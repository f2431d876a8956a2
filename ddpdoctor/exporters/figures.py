"""The figures of a report, as tables and numbers that other tools show."""

from __future__ import annotations

from collections.abc import Iterator

from ..report.findings import Report, Severity
from ..run import fold_ranks

FINDING_COLUMNS = (
    "code", "check", "severity", "confidence", "ranks", "where", "summary", "cause", "fix",
)  # fmt: skip


def finding_rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each finding, by `FINDING_COLUMNS`."""
    return [
        (
            f.code, f.check, f.severity.value, f.confidence.value, fold_ranks(f.ranks),
            str(f.location or ""), f.summary, f.cause, f.fix,
        )
        for f in report.findings
    ]  # fmt: skip


def counts(report: Report) -> dict[str, int]:
    """The number of findings of each severity."""
    return {s.value: sum(f.severity is s for f in report.findings) for s in Severity}


def per_rank(report: Report) -> Iterator[tuple[str, int, float]]:
    """Numbers of each rank: a name such as `seconds/forward`, the rank, the value."""
    for row in report.ledger:
        for account, seconds in row.accounts.items():
            yield f"seconds/{account}", row.rank, seconds
    for rank in report.ranks:
        for name, value in (
            ("steps", rank.steps),
            ("step_time_s", rank.step_time_s),
            ("host_memory_peak_bytes", rank.host_memory_peak_bytes),
            ("device_memory_peak_bytes", rank.device_memory_peak_bytes),
        ):
            if value is not None:
                yield name, rank.rank, value
