"""Builds the documentation site: `make docs`. No network is needed.

The guides stand in `docs/pages/`. A page for each check is made of its docstring and its samples;
what is reported about the faulty one stands in `docs/reports/`, which `--record` writes by running
every sample (some minutes). `--schema` writes the JSON schema of findings.json.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES, REPORTS = DOCS / "pages", DOCS / "reports"
SCHEMA = PAGES / "findings.schema.json"
SOURCES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
WIDTH = 88

sys.path[:0] = [str(ROOT / "tests")]

from ddpdoctor import render  # noqa: E402
from ddpdoctor.report import registry  # noqa: E402
from ddpdoctor.report.findings import Check, Finding, Report  # noqa: E402


def schema() -> bytes:
    """The JSON schema of findings.json, from the types that write it."""
    whole = msgspec.json.schema(Report, schema_hook=lambda kind: {"description": "any value"})
    named = {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}
    return msgspec.json.format(msgspec.json.encode(named), indent=1) + b"\n"


# --- Pages of checks -----------------------------------------------------------------------------


def sample(check: Check, *, clean: bool = False) -> Path:
    name = check.name.replace("-", "_") + ("_clean" if clean else "")
    return ROOT / "samples" / check.family / f"{name}.py"


def page(check: Check, checks: tuple[Check, ...]) -> str:
    """The page of a check in Markdown."""
    title, _, body = inspect.cleandoc(type(check).__doc__ or "").partition("\n")
    parts = [
        f"# {check.code} {check.name}",
        f"**{check.severity.value}**, family *{check.family}*: {title}",
        with_blank_lines(body.strip("\n")),
    ]
    if check.rules:
        parts += ["## Rules", listed(f"`{rule}`: {when}" for rule, when in check.rules.items())]
    causes = [(c, e) for c in checks for e in c.effects if check.name in e.checks]
    if check.effects:
        of = (", ".join(link(n, checks) for n in e.checks) + said(e) for e in check.effects)
        parts += ["## What follows from it", listed(of)]
    if causes:
        parts += [
            "## What it may follow from",
            listed(link(c.name, checks) + said(e) for c, e in causes),
        ]
    parts += ["## A program with the fault", code(sample(check))]
    report = REPORTS / f"{check.name}.txt"
    if report.exists():
        parts += ["What is reported about it:", f"```text\n{report.read_text().rstrip()}\n```"]
    else:
        parts += ["Its report has not been recorded yet: that needs GPUs, or a quiet machine."]
    parts += ["## Its correct neighbour", code(sample(check, clean=True))]
    return "\n\n".join(parts) + "\n"


def said(effect: object) -> str:
    words = effect.describe()  # type: ignore[attr-defined]
    return f": {words}" if words else ""


def link(name: str, checks: tuple[Check, ...]) -> str:
    return f"[{name}]({name}.md)" if any(c.name == name for c in checks) else f"`{name}`"


def listed(items: Iterator[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def code(path: Path) -> str:
    """A sample without its docstring, which is about how it is tested."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    lines = text.splitlines()
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines = lines[first.end_lineno :]
    name = path.relative_to(ROOT)
    return f'```python title="{name}"\n' + "\n".join(lines).strip("\n") + "\n```"


def with_blank_lines(text: str) -> str:
    """Docstrings put lists right after a paragraph; Markdown wants a blank line before them."""
    lines: list[str] = []
    fenced = False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        item = re.match(r"[-*] |\d+\. ", line)
        inside = re.match(r"[-*] |\d+\. |  +", before)
        heading = before.startswith("#") or line.startswith("#")
        if not fenced and before and ((item and not inside) or heading):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def index(checks: tuple[Check, ...]) -> str:
    """The table of all checks."""
    rows = ["# Checks", "", "| code | check | severity | what it finds |", "|---|---|---|---|"]
    for check in checks:
        title = (type(check).__doc__ or "").strip().splitlines()[0]
        name = f"[{check.name}]({check.name}.md)"
        rows.append(f"| {check.code} | {name} | {check.severity.value} | {title} |")
    return "\n".join(rows) + "\n"


def write_sources() -> None:
    """Everything that mkdocs reads, into `build/docs`."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(PAGES, SOURCES)
    (SOURCES / "checks").mkdir()
    checks = registry.all_checks()
    (SOURCES / "checks" / "index.md").write_text(index(checks))
    for check in checks:
        (SOURCES / "checks" / f"{check.name}.md").write_text(page(check, checks))


# --- Reports -------------------------------------------------------------------------------------


def record(names: list[str]) -> None:
    """Run the samples of these checks (of all without a name) and keep what was found."""
    from sampling import launched, read

    for check in registry.all_checks():
        path = sample(check)
        if names and check.name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="ddpdoctor-docs-") as folder:
            try:
                _, report = launched(read(path), Path(folder).resolve())
            except AssertionError as error:
                print(f"{check.name}: {str(error).splitlines()[0]}", flush=True)
                continue
        found = [f for f in report.findings if f.check == check.name]
        print(f"{check.name}: {len(found)} of {len(report.findings)} findings", flush=True)
        if found:
            (REPORTS / f"{check.name}.txt").write_text(shown(found[0], path.parent, Path(folder)))


def shown(finding: Finding, *folders: Path) -> str:
    text = render.findings_text([finding], WIDTH)
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return text.strip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", nargs="*", metavar="CHECK")
    parser.add_argument("--schema", action="store_true")
    parser.add_argument("--sources-only", action="store_true")
    args = parser.parse_args()
    if args.schema:
        SCHEMA.write_bytes(schema())
        return 0
    if args.record is not None:
        record(args.record)
        return 0
    write_sources()
    if args.sources_only:
        return 0
    words = ["build", "--strict", "--quiet", "--config-file", str(DOCS / "mkdocs.yml")]
    return subprocess.run([sys.executable, "-m", "mkdocs", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
