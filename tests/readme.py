"""Writes the parts of README and CONTRIBUTING that come from the code: `make readme`.

The table of layers is made from `layers.MAY_IMPORT`, that of checks from the checks, the
picture from a real run of a sample, those of costs from the last `benchmarks/overhead.py` and
`benchmarks/peers.py`. The picture of the page is drawn where there is a Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import events_index
import layers

from ddpdoctor import render
from ddpdoctor.report import registry
from ddpdoctor.report.postmortem import open_run

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PICTURE = ROOT / "samples" / "report.svg"
PICTURED = "samples/model/unused_parameter.py"
PAGE_PICTURE = ROOT / "samples" / "page.png"
PAGE_KEPT = ROOT / "samples" / "page.html"
PAGE_PICTURED = "samples/hang/rank_missing.py"
PAGE_SIZE = 1000, 1340
"""Of the window, in pixels."""
COSTS = {name: ROOT / "benchmarks" / f"{name}.md" for name in ("overhead", "peers", "scale")}


def check_table() -> str:
    """One row per check, in the order of the codes."""
    rows = ["| code | check | severity | what it finds |", "|---|---|---|---|"]
    for check in registry.all_checks():
        title = (type(check).__doc__ or "").strip().splitlines()[0]
        rows.append(f"| {check.code} | `{check.name}` | {check.severity.value} | {title} |")
    return "\n".join(rows)


def with_block(text: str, name: str, content: str) -> str:
    """`text` with what stands between the two markers replaced."""
    pattern = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- /{name} -->)", re.S)
    return pattern.sub(lambda m: f"{m[1]}{content}\n{m[2]}", text)


def updated(text: str) -> str:
    """The README as it should read now."""
    text = with_block(text, "checks", check_table())
    for name, path in COSTS.items():
        if path.exists():
            text = with_block(text, name, path.read_text().strip())
    return text


def contributing(text: str) -> str:
    """CONTRIBUTING as it should read now."""
    return with_block(text, "layers", layers.table())


def run_sample(out: Path, sample: str, *options: str) -> None:
    command = [sys.executable, "-m", "ddpdoctor", "run", "--quiet", "--out", str(out)]
    command += [*options, sample]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)


def draw_page(browser: str) -> None:
    """The page about a run that hung, and its top as the browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        options = ["--nproc-per-node", "4", "--hang-after", "5", "--on-hang", "stop", "--html"]
        run_sample(Path(folder) / "run", PAGE_PICTURED, *options, str(page))
        page.write_text(page.read_text().replace(f"{folder}/", "ddpdoctor-runs/"))
        PAGE_KEPT.write_text(page.read_text())
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--screenshot={PAGE_PICTURE}",
        ]
        size = f"--window-size={PAGE_SIZE[0]},{PAGE_SIZE[1]}"
        command = [browser, *options, size, page.as_uri()]
        subprocess.run(command, capture_output=True, timeout=60, check=True)


def picture() -> str:
    """The report of a sample's run as it stands on a terminal, as SVG."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_sample(out, PICTURED)
        report = open_run([out]).report(registry.all_checks())
        printed = render.text(report, 96, styled=True).replace(f"{folder}/", "ddpdoctor-runs/")
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=98, file=nowhere)
        console.print(Text.from_ansi(printed))
    return console.export_svg(title=f"ddpdoctor run {PICTURED}", unique_id="report")


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
    CONTRIBUTING.write_text(contributing(CONTRIBUTING.read_text()))
    events_index.INDEX.write_text(events_index.text())
    if "--no-picture" not in sys.argv:
        PICTURE.write_text(picture())
        if browser := shutil.which("chromium"):
            draw_page(browser)
