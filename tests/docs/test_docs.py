"""The documentation site: what it is made of is fresh, its links lead somewhere, it needs no
network; findings.json keeps to the schema that it publishes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from readers import loader, run_of
from sampling import ROOT
from toys import ToyBlind, ToyHostile, ToyQuiet, ToyStep

from ddpdoctor.report import registry
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import Run

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """`docs/make_site.py`, imported."""
    spec = importlib.util.spec_from_file_location("make_site", DOCS / "make_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(site, "SOURCES", tmp_path / "docs")
    site.write_sources()
    return tmp_path / "docs"


def two_loaders() -> Run:
    """Two ranks with a loader each."""
    return run_of(*(loader(0, [range(rank, 8, 2)]) for rank in (0, 1)))


def schema_errors(content: Any) -> list[str]:
    """Where a findings.json differs from the published schema."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install -e '.[dev]'")
    schema = json.loads((DOCS / "pages" / "findings.schema.json").read_text())
    found = jsonschema.Draft202012Validator(schema).iter_errors(content)
    return [f"{list(e.absolute_path)}: {e.message}" for e in found]


def test_the_schema_is_fresh(site: ModuleType) -> None:
    assert site.SCHEMA.read_bytes() == site.schema(), "type `make docs-schema`"


def test_reports_keep_to_the_schema() -> None:
    toys = [ToyStep(), ToyQuiet(), ToyBlind(), ToyHostile()]
    report = diagnose(two_loaders(), toys, folder="a")
    content = json.loads(report.to_json())
    assert content["findings"] and schema_errors(content) == []
    content["findings"][0]["severity"] = "fatal"
    del content["run"]["outcome"]
    assert len(schema_errors(content)) == 2


def test_every_check_has_a_page(site: ModuleType, sources: Path) -> None:
    listed = (sources / "checks" / "index.md").read_text()
    for check in registry.all_checks():
        text = (sources / "checks" / f"{check.name}.md").read_text()
        assert f"({check.name}.md)" in listed
        for heading in ("What it finds", "How it knows", "Why it hurts", "How to fix it"):
            assert f"\n## {heading}\n" in text
        assert text.count("```python title=") == 2
        assert all(rule in text for rule in check.rules)


def test_recorded_reports_are_of_checks(site: ModuleType) -> None:
    names = {check.name: check.code for check in registry.all_checks()}
    for path in site.REPORTS.glob("*.txt"):
        text = path.read_text()
        assert f"[{names[path.stem]}]" in text, f"make docs-reports CHECK={path.stem}"
        assert "ddpdoctor-docs-" not in text and str(ROOT) not in text


def test_lists_are_set_apart(site: ModuleType) -> None:
    text = (
        "A paragraph:\n- one\n  more of it\n- two\n## Next\nwords\n```\n# no heading\n- none\n```"
    )
    made = site.with_blank_lines(text)
    assert made == (
        "A paragraph:\n\n- one\n  more of it\n- two\n\n## Next\n\nwords\n"
        "```\n# no heading\n- none\n```"
    )


def test_links_in_the_sources_lead_somewhere(sources: Path) -> None:
    for path in sources.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not urlsplit(target).scheme:
                assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


def test_the_check_of_the_guide_works() -> None:
    text = (DOCS / "pages" / "writing-a-check.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    check = names["NoWorkers"]()
    assert len(list(check.examine(two_loaders()))) == 2


def test_what_the_guides_type_exists() -> None:
    """Options, commands and names of checks that the guides show."""
    from ddpdoctor.cli import COMMANDS
    from ddpdoctor.config import SETTINGS

    flags = {s.flag for s in SETTINGS}
    theirs = {"--format", "--rank", "--no-live", "--json", "--seconds"}
    for path in (DOCS / "pages").glob("*.md"):
        for line in path.read_text().splitlines():
            if match := re.search(r"ddpdoctor (\w+) ?(.*)", line):
                word = match[1]
                if f"`ddpdoctor {word}" in line or line.startswith("ddpdoctor "):
                    assert word in COMMANDS or word == "COMMAND", f"{path.name}: {line}"
        for flag in re.findall(r"`(--[a-z-]+)[ =`]", path.read_text()):
            known = flag in flags or flag in theirs or flag.startswith(("--nproc", "--log-dir"))
            assert known, f"{path.name}: {flag}"


class Links(HTMLParser):
    """What a page refers to, and the names in it that can be referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        if "id" in given:
            self.names.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img"):
            rel = given.get("rel", "")
            if source := given.get("src") or given.get("href"):
                (self.links if rel in ("canonical", "prev", "next") else self.loads).append(source)


def read_pages(site: Path) -> dict[Path, Links]:
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = Links()
        pages[path].feed(path.read_text())
    return pages


def broken(pages: dict[Path, Links]) -> Iterator[str]:
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads:
                    yield f"{path.name} loads {target} from the network"
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not place.exists():
                yield f"{path.name}: {target}"
            elif parts.fragment and place in pages and parts.fragment not in pages[place].names:
                yield f"{path.name}: {target} has no such heading"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_is_built_and_its_links_lead_somewhere() -> None:
    pytest.importorskip("material", reason="make docs")
    done = subprocess.run(
        [sys.executable, str(DOCS / "make_site.py")],
        capture_output=True,
        text=True,
        timeout=380,
        env={
            "PATH": "/usr/bin:/bin",
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = read_pages(ROOT / "build" / "site")
    assert len(pages) > len(registry.all_checks()) + 10
    assert list(broken(pages)) == []
