"""Findings of several groups of ranks that are one: each group does it at the same line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ...report.findings import Evidence, Finding, Steps
from ...run import fold_ranks, ranks_text

Told = tuple[tuple[int, ...], Finding]
"""What is said, and of which group of ranks."""

_RANKS = re.compile(r"\branks? \d[\d,-]*")


def united(reported: Iterable[Told]) -> Iterator[Finding]:
    """Those at one line that say the same of groups which have no rank in common, as one. Where no
    line is known, nothing tells that it is one fault."""
    together: dict[object, list[list[Told]]] = {}
    for members, finding in reported:
        what = _RANKS.sub("", finding.label)
        place = finding.code, finding.severity, finding.confidence, finding.location, what
        alike = together.setdefault(place if finding.location else id(finding), [])
        taken = (other for other in alike if all(set(members).isdisjoint(m) for m, _ in other))
        mine = next(taken, None)
        if mine is None:
            alike.append([(members, finding)])
        else:
            mine.append((members, finding))
    for alike in together.values():
        yield from map(_one, alike)


def _one(reported: Sequence[Told]) -> Finding:
    """The first in time speaks for all."""
    (_, first), *others = sorted(reported, key=lambda t: t[1].at)
    if not others:
        return first
    findings = [f for _, f in reported]
    ranks = tuple(sorted({r for f in findings for r in f.ranks}))
    rest = tuple(sorted({r for _, f in others for r in f.ranks}))
    rows = [
        {"ranks": fold_ranks(members)} | ({"from_step": f.steps.first} if f.steps else {})
        for members, f in sorted(reported, key=lambda t: t[0])
    ]
    return msgspec.structs.replace(
        first,
        ranks=ranks,
        steps=_steps([f.steps for f in findings]),
        subjects=tuple(dict.fromkeys(s for f in (first, *findings) for s in f.subjects)),
        optimizers=tuple(sorted({n for f in findings for n in f.optimizers})),
        label=first.label.replace(ranks_text(first.ranks), ranks_text(ranks)),
        summary=f"{first.summary}; and likewise on {ranks_text(rest)} in "
        + ("another group" if len(others) == 1 else "other groups"),
        evidence=first.evidence | _ranks_named(findings) | {"groups": rows},
    )


def _steps(every: Sequence[Steps | None]) -> Steps | None:
    """From the first of any to the last of any, as often as the most."""
    known = [s for s in every if s is not None]
    if len(known) < len(every):
        return None
    most = max(known, key=lambda s: s.count)
    return msgspec.structs.replace(
        most, first=min(s.first for s in known), last=max(s.last for s in known)
    )


def _ranks_named(findings: Sequence[Finding]) -> Evidence:
    """Evidence that is a list of ranks, of all."""
    named = {k for f in findings for k, v in f.evidence.items() if k.endswith("_on")}
    lists = {k: [v for f in findings if isinstance(v := f.evidence.get(k), list)] for k in named}
    return {k: sorted({n for v in every for n in v}) for k, every in lists.items() if every}
