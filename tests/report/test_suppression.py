"""Findings that do not count stay in the report, with the reason; what matches nothing is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recordings import make_run, site, started, steps
from toys import ToyBlind, ToyQuiet, ToyStep

from ddpdoctor import render
from ddpdoctor.config import ConfigError, resolve
from ddpdoctor.report.findings import Finding, Report, Severity
from ddpdoctor.report.postmortem import report_of
from ddpdoctor.report.suppression import Ignored, Unwanted, by_comment, fingerprint, read_baseline
from ddpdoctor.run import Location, Run

CHECKS = ToyStep(), ToyQuiet(), ToyBlind()


def run_of(tmp_path: Path, text: str = "") -> Run:
    script = tmp_path / "train.py"
    script.write_text(text)
    line = msgspec.structs.replace(site(1, "train.py", 2, "opt.step()"), file=str(script))
    begun = msgspec.structs.replace(started(0, 1), cwd=str(tmp_path))
    return make_run({0: [begun, line, *steps(9, site=1)]})


def report(tmp_path: Path, unwanted: Unwanted, text: str = "") -> Report:
    return report_of([run_of(tmp_path, text)], CHECKS, "runs/a", unwanted)


def commented(comment: str) -> Finding:
    (finding,) = ToyStep().examine(make_run({0: steps(3, site=1)}))
    return msgspec.structs.replace(finding, location=Location("a.py", 3, "f", f"x = 1  {comment}"))


@pytest.mark.parametrize("words", ["DDP997", "toy-step", "ddp9", "drift", "DDP101, DDP997"])
def test_a_comment_at_its_line(words: str) -> None:
    kept, (one,) = by_comment([commented(f"# ddpdoctor: ignore[{words}] on purpose")], CHECKS)
    assert not kept
    assert (one.reason, one.where) == ("on purpose", "a.py:3")


@pytest.mark.parametrize("comment", [
    "# ddpdoctor: ignore[DDP101] on purpose", "# ignore[DDP997]", "# ddpdoctor: ignore[] x",
])  # fmt: skip
def test_a_comment_that_means_something_else(comment: str) -> None:
    kept, suppressed = by_comment([commented(comment)], CHECKS)
    assert len(kept) == 1 and not suppressed


def test_an_entry_of_the_file(tmp_path: Path) -> None:
    unwanted = Unwanted((Ignored("toy-step", "local SGD", "pyproject.toml"),))
    told = report(tmp_path, unwanted)
    assert told.worst() is None and not told.findings
    (one,) = told.suppressed
    assert (one.finding.code, one.reason, one.where) == ("DDP997", "local SGD", "pyproject.toml")
    assert "suppressed: DDP997 toy-step (train.py:88): local SGD (pyproject.toml)" in (
        " ".join(render.text(told).split())
    )
    (result,) = json.loads(render.sarif(told))["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "local SGD"}]


def test_a_baseline(tmp_path: Path) -> None:
    before = report(tmp_path, Unwanted())
    file = tmp_path / "findings.json"
    file.write_bytes(before.to_json())
    known = read_baseline(file)
    assert known == {fingerprint(before.findings[0])}
    told = report(tmp_path, Unwanted((), known, "baseline findings.json"))
    assert told.worst() is None and told.suppressed[0].where == "baseline findings.json"
    # What a baseline holds suppressed is known, too.
    file.write_bytes(told.to_json())
    assert read_baseline(file) == known
    other = Unwanted((), frozenset({"another"}), "baseline")
    assert report(tmp_path, other).worst() is Severity.ERROR


def test_entries_that_match_nothing(tmp_path: Path) -> None:
    asked = ("toy-quiet", "toy-blind", "toy-step", "DDP1")
    unwanted = Unwanted(tuple(Ignored(name, "x", "pyproject.toml") for name in asked))
    # The toy that is blind was not examined, and no check is called DDP1.
    assert report(tmp_path, unwanted).unused_suppressions == (
        "ignore of toy-quiet in pyproject.toml",
    )


def test_comments_that_match_nothing(tmp_path: Path) -> None:
    text = "a = 1\nb = 2  # ddpdoctor: ignore[DDP997, toy-blind] x\n# ddpdoctor: ignore[DDP5]\n"
    told = report(tmp_path, Unwanted(), text)
    assert told.unused_suppressions == ("ignore[DDP997] at train.py:2",)
    assert "matches nothing: ignore[DDP997] at train.py:2" in render.text(told)


def test_the_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.ddpdoctor]\nquiet = true\n\n[[tool.ddpdoctor.ignore]]\ncheck = "DDP504"\n'
        'reason = "one epoch"\n'
    )
    options = resolve({}, environ={}, cwd=tmp_path)
    (entry,) = options.ignored
    assert (entry.check, entry.reason) == ("DDP504", "one epoch")
    assert options.ignore == () and options.quiet


@pytest.mark.parametrize("entry", [
    'check = "DDP504"', 'check = 3\nreason = "x"', 'check = "a"\nreason = "b"\nfile = "c"',
])  # fmt: skip
def test_an_entry_that_cannot_be_used(tmp_path: Path, entry: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[[tool.ddpdoctor.ignore]]\n{entry}\n")
    with pytest.raises(ConfigError, match=r"needs check = "):
        resolve({}, environ={}, cwd=tmp_path)


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), ("{}", "no findings.json")])
def test_a_baseline_that_cannot_be_read(tmp_path: Path, content: Any, why: str) -> None:
    file = tmp_path / "b.json"
    if content is not None:
        file.write_text(content)
    options = resolve({"baseline": str(file)}, environ={}, cwd=tmp_path)
    with pytest.raises(ConfigError, match=why):
        options.unwanted()
