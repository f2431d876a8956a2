"""Golden reports: what checks say in tests, word for word, in files that a command rewrites.

Every finding that a check makes in a test is compared with `tests/golden/<folder>/<module>.txt`.
Tests assert rules, ranks, lines and facts; the words are held here. `make golden` writes the files
anew: read the difference before you commit it.

Tests that start ranks are left out: what these record differs from run to run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.report import registry
from ddpdoctor.report.findings import Check, Finding

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
MOST = 12
"""Findings of one test that are held; some tests try hundreds of cases."""

HEAD = "=== "

collected: list[Finding] = []
"""What checks found in the test that runs now."""

results: dict[str, dict[str, str]] = {}
"""By golden file, by test: what was found, in a run that rewrites."""


def watch() -> None:
    """Have every check of this package keep what it finds."""
    for check in registry.all_checks():
        kind = type(check)
        if "examine" in vars(kind) and kind.__module__.startswith("ddpdoctor."):
            kind.examine = _kept(kind.examine)  # type: ignore[method-assign]


def _kept(examine: Any) -> Any:
    @functools.wraps(examine)
    def wrapper(self: Check, run: Any) -> Iterator[Finding]:
        for finding in examine(self, run):
            assert finding.rule in {self.name, *self.rules}, f"{finding.rule} is not in `rules`"
            collected.append(finding)
            yield finding

    return wrapper


def file_of(item: pytest.Item) -> Path:
    """The golden file of a test's module."""
    return GOLDEN / item.path.relative_to(TESTS).with_suffix(".txt")


def said(findings: Iterable[Finding], folder: str) -> str:
    """Findings as text, each once, without the names of temporary folders."""
    texts = dict.fromkeys(_text(f) for f in findings)
    shown = "\n".join(list(texts)[:MOST])
    shown = shown.replace(folder, "TMP")
    return re.sub(r"/tmp/[\w./-]*", "TMP", shown)


def _text(finding: Finding) -> str:
    place = f" {finding.location}" if finding.location else ""
    steps = f" steps {finding.steps.first}-{finding.steps.last}" if finding.steps else ""
    ranks = ",".join(map(str, finding.ranks)) or "-"
    head = f"{finding.code} {finding.severity.value} {finding.rule} ranks {ranks}{steps}{place}"
    if finding.confidence.value != "proven":
        head += " (suspected)"
    lines = [f"  {k}: {getattr(finding, k)}" for k in ("label", "summary", "cause", "fix")]
    lines += [f"  at {r.location}: {r.label}" for r in finding.related]
    lines += [f"  {name} = {value}" for name, value in finding.evidence.items()]
    return "\n".join(_printable(line) for line in (head, *lines))


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)


@functools.cache
def kept(path: Path) -> dict[str, str]:
    """What a golden file holds, by test."""
    if not path.exists():
        return {}
    parts = ("\n" + path.read_text()).split(f"\n{HEAD}")[1:]
    return {name: text.strip("\n") for name, _, text in (p.partition("\n") for p in parts)}


def write(path: Path, found: dict[str, str]) -> None:
    """Write a golden file anew; tests that found nothing are not in it."""
    shown = {name: text for name, text in found.items() if text}
    if not shown:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(f"{HEAD}{name}\n{shown[name]}" for name in sorted(shown)) + "\n")
