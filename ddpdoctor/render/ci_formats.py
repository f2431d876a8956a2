"""A report in the formats that CI reads: SARIF, JUnit XML, and the annotations of GitHub Actions.

Sources: the SARIF 2.1.0 standard of OASIS and what GitHub's code scanning takes of it; the XML that
Jenkins and GitLab read; GitHub's page "Workflow commands".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from datetime import timezone
from pathlib import PurePath
from urllib.parse import quote
from xml.etree import ElementTree

import msgspec

from ..report import registry
from ..report.findings import Check, Confidence, Finding, Report, Severity, Suppressed
from ..report.suppression import fingerprint
from ..run import Location, fold_ranks
from .safe_text import between, clean, clean_lines, moment

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: Mapping[Severity, str] = {
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.NOTE: "note",
}
"""By severity, what SARIF calls it."""

ANNOTATIONS: Mapping[Severity, str] = {**LEVELS, Severity.NOTE: "notice"}
"""And GitHub's workflow commands."""

SOURCE_ROOT = "SRCROOT"
"""The name of the folder in which the run was started; paths of findings are relative to it."""


# --- SARIF ---------------------------------------------------------------------------------------


def sarif(report: Report) -> str:
    """The report as a SARIF 2.1.0 log with one run: a result for each finding, at the user's line.

    Findings without a line are put at the first line of the script, as code scanning refuses
    results without one.
    """
    checks = [c for c in registry.all_checks() if c.name in _named(report)]
    order = {check.code: n for n, check in enumerate(checks)}
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": report.tool.name,
                        "semanticVersion": report.tool.version,
                        "version": report.tool.version,
                        "rules": [_rule(check) for check in checks],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {
                    SOURCE_ROOT: {"description": {"text": "where the run was started"}}
                },
                "invocations": [_invocation(report)],
                "results": [
                    *(_result(report, finding, order) for finding in report.findings),
                    *(_suppressed(report, one, order) for one in report.suppressed),
                ],
            }
        ],
    }
    return msgspec.json.format(msgspec.json.encode(log), indent=2).decode() + "\n"


def _named(report: Report) -> set[str]:
    """The checks that a report speaks of."""
    skipped = (s.check for s in report.coverage.skipped)
    apart = (s.finding.check for s in report.suppressed)
    return {f.check for f in report.findings} | {*report.coverage.examined, *skipped, *apart}


def _rule(check: Check) -> dict[str, object]:
    title, _, rest = (inspect.getdoc(check) or check.name).partition("\n")
    return {
        "id": check.code,
        "name": check.name,
        "shortDescription": {"text": title},
        "fullDescription": {"text": title},
        "help": {"text": rest.strip() or title, "markdown": rest.strip() or title},
        "defaultConfiguration": {"level": LEVELS[check.severity]},
        "properties": {"tags": [check.family]},
    }


def _invocation(report: Report) -> dict[str, object]:
    run = report.run
    words: dict[str, object] = {
        "executionSuccessful": run.exit_code == 0,
        "commandLine": clean(" ".join(run.command), 2000),
        "toolExecutionNotifications": [
            {"level": "warning", "message": {"text": clean(text, 1000)}}
            for text in report.coverage.lost
        ],
    }
    if run.exit_code is not None:
        words["exitCode"] = run.exit_code
    for name, text in (("startTimeUtc", run.started_at), ("endTimeUtc", run.ended_at)):
        if text and moment(text):
            words[name] = _utc(text)
    return words


def _utc(text: str) -> str:
    """A moment of a report (`2026-01-31T09:00:00+0100`) as RFC 3339 has it, in UTC."""
    known = moment(text)
    if known is None:
        return text
    return known.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _result(report: Report, finding: Finding, order: Mapping[str, int]) -> dict[str, object]:
    place = finding.location or _script(report)
    text = _sentences(finding)
    result: dict[str, object] = {
        "ruleId": finding.code,
        "level": LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [{"physicalLocation": _place(place)}] if place else [],
        "relatedLocations": [
            {
                "id": n,
                "message": {"text": clean(related.label)},
                "physicalLocation": _place(related.location),
            }
            for n, related in enumerate(finding.related, 1)
        ],
        "partialFingerprints": {"ddpdoctor/v1": fingerprint(finding)},
        "properties": {
            "ranks": list(finding.ranks),
            "rule": finding.rule,
            "confidence": finding.confidence.value,
            "subjects": [clean(s) for s in finding.subjects],
        },
    }
    if finding.code in order:
        result["ruleIndex"] = order[finding.code]
    return result


def _suppressed(report: Report, one: Suppressed, order: Mapping[str, int]) -> dict[str, object]:
    in_source = one.where == str(one.finding.location)
    why = {
        "kind": "inSource" if in_source else "external",
        "justification": clean(one.reason, 1000),
    }
    return {**_result(report, one.finding, order), "suppressions": [why]}


def _place(place: Location) -> dict[str, object]:
    region: dict[str, object] = {"startLine": max(1, place.line)}
    if place.source:
        region["snippet"] = {"text": clean(place.source, 400)}
    path = PurePath(place.file)
    if path.is_absolute():
        file: dict[str, object] = {"uri": f"file://{quote(str(path))}"}
    else:
        file = {"uri": quote(path.as_posix()), "uriBaseId": SOURCE_ROOT}
    return {"artifactLocation": file, "region": region}


def _script(report: Report) -> Location | None:
    """The first line of the script that was run, as far as the command names one."""
    scripts = (word for word in report.run.command if word.endswith(".py"))
    return next((Location(word, 1) for word in scripts), None)


# --- JUnit ---------------------------------------------------------------------------------------


def junit(report: Report) -> str:
    """The report as JUnit XML: a test case for each check. Errors and warnings fail theirs (each
    after the first fails one of its own, as many readers show one failure a case), notes are the
    output; a check that was not examined is skipped, with the reason."""
    found: dict[str, list[Finding]] = {}
    for finding in filter(_fails, report.findings):
        found.setdefault(finding.check, []).append(finding)
    told = {f.check for f in report.findings}
    skipped = {s.check: s.reason for s in report.coverage.skipped if s.check not in told}
    every = sorted({*told, *report.coverage.examined, *skipped})
    cases = [case for name in every for case in _cases(name, found.get(name), skipped)]
    took = between(report.run.started_at, report.run.ended_at) or 0.0
    known = moment(report.run.started_at)
    suite = ElementTree.Element(
        "testsuite",
        name=report.tool.name,
        package=report.tool.name,
        id="0",
        hostname="localhost",  # what Ant's schema asks for where no one host is meant
        tests=str(len(cases)),
        failures=str(sum(map(len, found.values()))),
        errors="0",
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        time=f"{max(0.0, took):.3f}",
        # The schema asks for a time, also where none is known.
        timestamp=_utc(report.run.started_at if known else "1970-01-01T00:00:00Z").rstrip("Z"),
    )
    ElementTree.SubElement(suite, "properties")
    suite.extend(cases)
    notes = (_sentences(f, place=True) for f in report.findings if not _fails(f))
    ElementTree.SubElement(suite, "system-out").text = "\n\n".join(notes)
    ElementTree.SubElement(suite, "system-err")
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _cases(
    name: str, found: list[Finding] | None, skipped: Mapping[str, str]
) -> Iterator[ElementTree.Element]:
    """The test cases of a check: one for each finding, or one."""
    check = next((c for c in registry.all_checks() if c.name == name), None)
    title = f"{check.code} {name}" if check else name
    family = check.family if check else ""
    for number, finding in enumerate(found or [None], 1):
        case = ElementTree.Element(
            "testcase",
            classname=f"ddpdoctor.{family}",
            name=title if number == 1 else f"{title} ({number})",
            time="0",
        )
        if finding is not None:
            failure = ElementTree.SubElement(
                case, "failure", type=finding.severity.value, message=clean(finding.summary, 1000)
            )
            failure.text = _sentences(finding, place=True)
        elif name in skipped:
            ElementTree.SubElement(case, "skipped", message=clean(skipped[name], 1000))
        yield case


def _fails(finding: Finding) -> bool:
    return finding.severity is not Severity.NOTE


# --- GitHub --------------------------------------------------------------------------------------


def github(report: Report) -> str:
    """The report as workflow commands of GitHub Actions: an annotation for each finding."""
    lines = list(_commands(report.findings))
    return "\n".join(lines) + "\n" if lines else ""


def _commands(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        title = f"{finding.code} {finding.check}"
        properties = {"title": title}
        if finding.location:
            properties = {
                "file": finding.location.file,
                "line": str(max(1, finding.location.line)),
                **properties,
            }
        given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        yield f"::{ANNOTATIONS[finding.severity]} {given}::{_escaped(_sentences(finding))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(clean(text)).replace(":", "%3A").replace(",", "%2C")


def _sentences(finding: Finding, *, place: bool = False) -> str:
    """A finding as plain text: what, on which ranks, why, what to change."""
    doubt = " (suspected)" if finding.confidence is Confidence.SUSPECTED else ""
    ranks = f" [ranks {fold_ranks(finding.ranks)}]" if finding.ranks else ""
    lines = [f"{clean(finding.summary, 2000)}{doubt}{ranks}"]
    if place and finding.location:
        lines.append(f"at {clean(finding.location)}: {clean(finding.location.source).strip()}")
    lines += [f"cause: {line}" for line in clean_lines(finding.cause)[:1]]
    lines += clean_lines(finding.cause)[1:]
    lines += [f"fix ({finding.fix_kind.value}): {line}" for line in clean_lines(finding.fix)[:1]]
    lines += clean_lines(finding.fix)[1:]
    lines += [f"follows from it: {clean(e.code)} {clean(e.check)}" for e in finding.consequences]
    return "\n".join(lines)
