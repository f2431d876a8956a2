"""SARIF, JUnit and GitHub's annotations say what the report says, and stay well-formed."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from recordings import make_run, site, steps, torch_loaded
from toys import ToyBlind, ToyHostile, ToyQuiet, ToyStep, only_toys

from ddpdoctor import render
from ddpdoctor.render import safe_text
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Report, Severity
from ddpdoctor.report.suppression import fingerprint
from ddpdoctor.run import Location

__all__ = ["only_toys"]


def report_of(*checks: Any) -> Report:
    events = [torch_loaded(), site(1, "train.py", 88, "opt.step()"), *steps(9, site=1)]
    run = make_run(dict.fromkeys(range(2), events))
    return diagnose(run, checks, folder="runs/a")


ALL = ToyStep(), ToyQuiet(), ToyBlind()


@pytest.mark.usefixtures("only_toys")
def test_sarif() -> None:
    log = json.loads(render.sarif(report_of(*ALL)))
    (run,) = log["runs"]
    (result,) = run["results"]
    rules = run["tool"]["driver"]["rules"]
    assert {r["id"] for r in rules} == {"DDP997", "DDP999", "DDP996"}
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "DDP997"
    assert result["level"] == "error"
    assert "rank-local gradients" in result["message"]["text"]
    (place,) = result["locations"]
    assert place["physicalLocation"]["artifactLocation"] == {
        "uri": "train.py", "uriBaseId": "SRCROOT",
    }  # fmt: skip
    assert place["physicalLocation"]["region"]["startLine"] == 88
    (related,) = result["relatedLocations"]
    assert related["physicalLocation"]["region"]["startLine"] == 101
    (invocation,) = run["invocations"]
    started = invocation["startTimeUtc"]
    assert started.endswith("Z") and datetime.fromisoformat(started).tzinfo is not None


def test_sarif_of_a_finding_elsewhere() -> None:
    report = report_of(ToyStep())
    finding = msgspec.structs.replace(report.findings[0], location=Location("/opt/my lib/a.py", 3))
    (run,) = json.loads(render.sarif(msgspec.structs.replace(report, findings=(finding,))))["runs"]
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "file:///opt/my%20lib/a.py"}


def test_the_same_fault_keeps_its_fingerprint_when_lines_move() -> None:
    (finding,) = report_of(ToyStep()).findings
    assert finding.location is not None
    moved = msgspec.structs.replace(finding.location, line=200)
    other = msgspec.structs.replace(finding.location, source="opt.step()")
    replace = msgspec.structs.replace
    assert fingerprint(replace(finding, location=moved, summary="4.7 %")) == fingerprint(finding)
    assert fingerprint(replace(finding, location=other)) != fingerprint(finding)
    assert fingerprint(replace(finding, rule="another")) != fingerprint(finding)


@pytest.mark.usefixtures("only_toys")
def test_junit() -> None:
    suites = ElementTree.fromstring(render.junit(report_of(*ALL)))
    (suite,) = suites
    counts = {k: suite.get(k) for k in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "3", "failures": "1", "skipped": "1", "errors": "0"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {"DDP997 toy-step", "DDP999 toy-quiet", "DDP996 toy-blind"}
    failure = cases["DDP997 toy-step"].find("failure")
    assert failure is not None and failure.get("type") == "error"
    assert "train.py:88" in str(failure.text) and "cause:" in str(failure.text)
    skipped = cases["DDP996 toy-blind"].find("skipped")
    assert skipped is not None and skipped.get("message") == "no GPU"
    assert len(cases["DDP999 toy-quiet"]) == 0


@pytest.mark.usefixtures("only_toys")
def test_every_finding_fails_a_test_case() -> None:
    report = report_of(*ALL)
    (finding,) = (f for f in report.findings if f.check == "toy-step")
    twice = msgspec.structs.replace(report, findings=(finding, finding))
    (suite,) = ElementTree.fromstring(render.junit(twice))
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    names = [
        case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None
    ]
    assert names == ["DDP997 toy-step", "DDP997 toy-step (2)"]


def test_notes_fail_no_test_case() -> None:
    report = report_of(ToyStep())
    note = msgspec.structs.replace(report.findings[0], severity=Severity.NOTE)
    (suite,) = ElementTree.fromstring(
        render.junit(msgspec.structs.replace(report, findings=(note,)))
    )
    assert suite.get("failures") == "0"
    output = suite.find("system-out")
    assert output is not None and "rank-local" in str(output.text)


def test_github() -> None:
    (line,) = render.github(report_of(ToyStep())).splitlines()
    assert line.startswith("::error file=train.py,line=88,title=DDP997 toy-step::rank-local")
    assert "%0Acause: " in line
    assert render.github(report_of(ToyQuiet())) == ""


def test_what_stands_in_a_record_does_no_harm() -> None:
    report = report_of(ToyHostile(), ToyStep())
    json.loads(render.sarif(report))
    ElementTree.fromstring(render.junit(report))
    lines = render.github(report).splitlines()
    assert len(lines) == 2 and all(re.match(r"::(error|warning|notice) ", line) for line in lines)
    hostile = msgspec.structs.replace(
        report.findings[0], summary="100%\n::error::x", location=Location("a,b:c.py", 1)
    )
    (line,) = render.github(msgspec.structs.replace(report, findings=(hostile,))).splitlines()
    assert line.startswith(f"::{line.split(' ')[0][2:]} file=a%2Cb%3Ac.py,line=1,")
    assert "100%25" in line


def test_times_are_read_as_python_3_10_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """That has no zone without a colon, and `run.json` has one."""

    class Strict(datetime):
        @classmethod
        def fromisoformat(cls, text: str) -> Any:
            assert not re.search(r"[+-]\d{4}$", text)
            return datetime.fromisoformat(text)

    monkeypatch.setattr(safe_text, "datetime", Strict)
    known = safe_text.moment("2026-01-31T09:00:00+0100")
    assert known is not None and known.isoformat() == "2026-01-31T09:00:00+01:00"
    assert safe_text.between("2026-01-31T09:00:00-0530", "2026-01-31T09:01:00-0530") == 60
    assert safe_text.moment("2026-01-31") is not None
    assert safe_text.moment("soon") is safe_text.moment(None) is None
    assert safe_text.between("2026-01-31T09:00:00", "2026-01-31T09:01:00-0530") is None
