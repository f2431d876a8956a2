"""One finding for several groups of ranks that make the same mistake at the same line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ...report.findings import Evidence, Finding, Steps
from ...report.merging import merged
from ...run import fold_ranks, ranks_text

Reported = tuple[tuple[int, ...], Finding]
"""A finding, and the group of ranks that it is about."""

MODIFIED_ON = "modified_on_ranks"
RESTORED_ON = "restored_on_ranks"
NO_GRADIENT_ON = "no_gradient_on_ranks"
ZEROS_ON = "zeros_on_ranks"
WRITTEN_ON = "written_on_ranks"
LOADED_ONLY_ON = "loaded_only_on_ranks"

RANK_LISTS = (
    MODIFIED_ON, RESTORED_ON, NO_GRADIENT_ON, ZEROS_ON, WRITTEN_ON, LOADED_ONLY_ON,
)  # fmt: skip
"""Names of the evidence whose value is a list of ranks."""


def united(reported: Iterable[Reported]) -> Iterator[Finding]:
    """The findings, with those of groups that have no rank in common made one where the rule, the
    line, the severity and the confidence are the same.

    Findings without a line stay separate: nothing tells that they are one fault.
    """
    together: dict[object, list[list[Reported]]] = {}
    for members, finding in reported:
        same = (
            finding.code, finding.severity, finding.confidence, finding.location, finding.rule,
        )  # fmt: skip
        groups = together.setdefault(same if finding.location else id(finding), [])
        free = (other for other in groups if all(set(members).isdisjoint(m) for m, _ in other))
        mine = next(free, None)
        if mine is None:
            groups.append([(members, finding)])
        else:
            mine.append((members, finding))
    for groups in together.values():
        yield from map(_one, groups)


def _one(reported: Sequence[Reported]) -> Finding:
    """One finding for all groups: the words of the first in time, the ranks and facts of all."""
    (_, first), *others = sorted(reported, key=lambda t: t[1].at)
    if not others:
        return first
    findings = [f for _, f in reported]
    rest = tuple(sorted({r for _, f in others for r in f.ranks}))
    rows = [
        {"ranks": fold_ranks(members)} | ({"from_step": f.steps.first} if f.steps else {})
        for members, f in sorted(reported, key=lambda t: t[0])
    ]
    elsewhere = "another group" if len(others) == 1 else "other groups"
    one = merged(
        (first, *findings),
        note=f"likewise {ranks_text(rest)} in {elsewhere}",
        evidence=_rank_lists(findings) | {"groups": rows},
    )
    return msgspec.structs.replace(one, steps=_steps([f.steps for f in findings]))


def _steps(every: Sequence[Steps | None]) -> Steps | None:
    """From the first step of any to the last of any, with the largest count."""
    known = [s for s in every if s is not None]
    if len(known) < len(every):
        return None
    most = max(known, key=lambda s: s.count)
    return msgspec.structs.replace(
        most, first=min(s.first for s in known), last=max(s.last for s in known)
    )


def _rank_lists(findings: Sequence[Finding]) -> Evidence:
    """Evidence that is a list of ranks, with the ranks of all findings."""
    lists = {
        name: [v for f in findings if isinstance(v := f.evidence.get(name), list)]
        for name in RANK_LISTS
    }
    return {name: sorted({n for v in every for n in v}) for name, every in lists.items() if every}
