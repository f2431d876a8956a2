"""SARIF against its schema, JUnit against what CI servers read, findings.json against ours, and the
action on real runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from sampling import ROOT, SAMPLES, inherited
from test_ci_formats import ALL, report_of
from toys import ToyHostile, ToyStep, only_toys

from ddpdoctor import render
from ddpdoctor.report.findings import Finding, Report, Severity, Suppressed
from ddpdoctor.run import Location

__all__ = ["only_toys"]

SCHEMA = Path(__file__).parent / "schemas" / "sarif-2.1.0-rtm.5.json.gz"

JUNIT: dict[str, tuple[list[str], set[str]]] = {
    "testsuites": (["testsuite"], set()),
    "testsuite": (
        ["properties", "testcase", "system-out", "system-err"],
        {"name", "package", "id", "hostname", "tests", "failures", "errors", "skipped", "time",
         "timestamp"},
    ),
    "testcase": (["failure", "skipped"], {"name", "classname", "time"}),
    "failure": ([], {"message", "type"}),
    "skipped": ([], {"message"}),
    "properties": ([], set()),
    "system-out": ([], set()),
    "system-err": ([], set()),
}  # fmt: skip
"""Element to its children, in this order, and its attributes, all needed: what holds both by the
schema of Ant's JUnit task, which asks for the most, and by that of Jenkins' xUnit plugin
(junit-10.xsd), of the elements that we write; by hand, as no package ships these files."""


def reports() -> dict[str, Report]:
    """Findings with and without a line, suppressed ones, hostile texts, no times."""
    plain = report_of(*ALL)
    replace = msgspec.structs.replace
    (finding,) = [f for f in plain.findings if f.check == "toy-step"]
    nowhere: Finding = replace(finding, location=None, severity=Severity.NOTE)
    elsewhere: Finding = replace(finding, location=Location("/opt/my lib/ä.py", 0, "f", "x = 1"))
    unwanted = (
        Suppressed(finding, "so it is meant", str(finding.location)),
        Suppressed(nowhere, "known", "baseline a"),
    )
    return {
        "plain": plain,
        "odd places": replace(plain, findings=(nowhere, elsewhere)),
        "suppressed": replace(plain, findings=(), suppressed=unwanted),
        "hostile": report_of(ToyHostile(), ToyStep()),
        "without times": replace(plain, run=replace(plain.run, ended_at=None, exit_code=None)),
    }


def sarif_errors(log: Any) -> list[str]:
    """What is wrong with a SARIF log, by the schema and by what GitHub asks for beside it."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install -e '.[dev]'")
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    wrong = [
        f"{list(error.absolute_path)}: {error.message}"
        for error in jsonschema.Draft4Validator(schema).iter_errors(log)
    ]
    for run in log["runs"]:
        rules = run["tool"]["driver"]["rules"]
        for result in run["results"]:
            if "ruleIndex" in result and rules[result["ruleIndex"]]["id"] != result["ruleId"]:
                wrong.append("the index of a rule is another one's")
            if not result["locations"] or not result["partialFingerprints"]:
                wrong.append("a result needs a place and a fingerprint")
    return wrong


def junit_errors(element: ElementTree.Element) -> list[str]:
    if element.tag not in JUNIT:
        return [f"no element is called {element.tag}"]
    children, needed = JUNIT[element.tag]
    given = set(element.keys())
    wrong = [f"{element.tag} lacks {name}" for name in needed - given]
    wrong += [f"{element.tag} has {name}" for name in given - needed]
    wrong += [f"{element.tag} holds {c.tag}" for c in element if c.tag not in children]
    order = [children.index(c.tag) for c in element if c.tag in children]
    if order != sorted(order) or (element.tag == "testcase" and len(order) > 1):
        wrong.append(f"{element.tag} holds too much, or in another order")
    for name in {"tests", "failures", "errors", "skipped"} & given:
        if not element.attrib[name].isdecimal():
            wrong.append(f"{name} is no number")
    stamp = element.get("timestamp", "2026-01-31T09:00:00")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", stamp):
        wrong.append(f"{stamp} is no time")
    return [*wrong, *(error for child in element for error in junit_errors(child))]


@pytest.mark.usefixtures("only_toys")
@pytest.mark.parametrize("kind", ["plain", "odd places", "suppressed", "hostile", "without times"])
def test_sarif_and_junit_are_valid(kind: str) -> None:
    report = reports()[kind]
    assert sarif_errors(json.loads(render.sarif(report))) == []
    assert junit_errors(ElementTree.fromstring(render.junit(report))) == []


@pytest.mark.usefixtures("only_toys")
def test_the_validation_sees_what_is_wrong() -> None:
    log = json.loads(render.sarif(reports()["plain"]))
    log["runs"][0]["results"][0]["level"] = "fatal"
    assert sarif_errors(log)
    broken = ElementTree.fromstring(render.junit(reports()["plain"]))
    ElementTree.SubElement(broken[0], "wrong")
    assert junit_errors(broken)


# --- The action ----------------------------------------------------------------------------------

ACTION = ROOT / ".github" / "actions" / "smoke" / "action.yml"


class Action:
    """The action, run as GitHub runs it: a shell for each step, inputs in its environment."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        yaml = pytest.importorskip("yaml", reason="pip install -e '.[dev]'")
        self.text = yaml.safe_load(ACTION.read_text())
        self.folder = folder
        given = {name: entry.get("default", "") for name, entry in self.text["inputs"].items()}
        self.inputs = {**given, **inputs}
        self.summary = folder / "summary.md"

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: self.inputs[m[1]], text)

    def step(self, name: str) -> subprocess.CompletedProcess[str]:
        (step,) = [s for s in self.text["runs"]["steps"] if s["name"] == name]
        assert "${{" not in step["run"], "an input in the script itself could be any command"
        added = {k: self.filled(v) for k, v in step.get("env", {}).items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env=inherited(PATH=path, GITHUB_STEP_SUMMARY=str(self.summary), **added),
            capture_output=True,
            text=True,
            timeout=280,
        )


def test_the_action_is_well_formed(tmp_path: Path) -> None:
    action = Action(tmp_path)
    assert action.text["runs"]["using"] == "composite"
    for step in action.text["runs"]["steps"]:
        assert step["shell"] == "bash"
    for output in action.text["outputs"].values():
        assert "${{" not in action.filled(output["value"])
    failed = Action(tmp_path).step("Report")
    assert failed.returncode == 1 and "the run did not start" in failed.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["unused_parameter", "unused_parameter_clean"])
def test_the_action(name: str, tmp_path: Path) -> None:
    faulty = not name.endswith("_clean")
    script = SAMPLES / "model" / f"{name}.py"
    action = Action(tmp_path, script=str(script), **{"max-steps": "6", "options": "--quiet"})
    ran = action.step("Run")
    assert bool(ran.returncode) == faulty, ran.stderr[-2000:]
    told = action.step("Report")
    assert told.returncode == 0, told.stderr[-2000:]
    assert ("title=DDP301" in told.stdout) == faulty
    assert action.summary.read_text().startswith("## ")
    log = json.loads((tmp_path / "ddpdoctor-run" / "report.sarif").read_text())
    assert sarif_errors(log) == []
    jsonschema = pytest.importorskip("jsonschema")
    published = json.loads((ROOT / "docs" / "pages" / "findings.schema.json").read_text())
    content = json.loads((tmp_path / "ddpdoctor-run" / "findings.json").read_text())
    assert list(jsonschema.Draft202012Validator(published).iter_errors(content)) == []
    tree = ElementTree.parse(tmp_path / "ddpdoctor-run" / "report.xml")
    assert junit_errors(tree.getroot()) == []
