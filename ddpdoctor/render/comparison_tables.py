"""Two runs side by side, for the console."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.text import Text

from ..report.comparison import Comparison, Figure
from ..report.findings import Finding
from . import report_text
from .report_text import Grid
from .safe_text import clean, duration, title, wrap
from .terminal import STYLES, captured, make_console, show

NAMES = {"overhead_percent": "the doctor's share"}
LARGEST = "  largest"
TIMES_FROM, TIMES_UNTIL = 3, 1000
"""What is so many times as much is told as `x 12`: `+1100.0 %` takes reckoning back. Of what was
next to nothing before, the ratio says nothing."""


def render(change: Comparison, width: int, *, styled: bool) -> str:
    console = make_console(StringIO(), width, styled)
    for name, report in (("before", change.before), ("after", change.after)):
        for n, part in enumerate(wrap(report_text.headline(report)[1], width - 7)):
            show(console, Text.assemble((f"{'' if n else name:<7}", "bold"), part))
        command = shlex.join(report.run.command) or "command unknown"
        show(console, Text(f"       {clean(command, 200)}", "dim"))
        show(console, Text(f"       {clean(report.run.folder)}", "dim"))
    for reason in change.unlike:
        for n, part in enumerate(wrap(clean(reason), width - 8)):
            show(console, Text(f"{'' if n else 'differs':<8}{part}", "yellow"))
    if not (change.appeared or change.went or change.stayed):
        show(console, Text("\nno findings in either run"))
    for name, findings in groups(change):
        for line in _group(name, findings, width):
            show(console, line)
    if change.figures:
        show(console, Text())
        for line in _figures(change.figures):
            show(console, line)
    return captured(console)


def _group(name: str, findings: Sequence[Finding], width: int) -> Iterator[Text]:
    yield Text(f"\n{name} ({len(findings)})", "bold")
    for finding in findings:
        code, sentence = report_text.first_line(finding)
        first, *rest = wrap(f"{code} {sentence}", width - 4, width - 2)
        opening = Text(f"  {first}")
        opening.stylize(STYLES[finding.severity], 2, 2 + len(code))
        yield opening
        yield from (Text(f"    {line}") for line in rest)
        if finding.location:
            yield Text(f"    --> {clean(finding.location)}", "dim")


def groups(change: Comparison) -> list[tuple[str, tuple[Finding, ...]]]:
    """The findings that appeared, went and stayed, where there are some."""
    every = (("appeared", change.appeared), ("went", change.went), ("stayed", change.stayed))
    return [(name, findings) for name, findings in every if findings]


def figures_grid(figures: Sequence[Figure]) -> Grid:
    """The numbers of both runs; after one that is not alike on all ranks a row of the largest."""
    head, *rows = _rows(figures)
    return Grid(head, tuple(rows))


def _rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("median over ranks", "before", "after", "change")]
    for f in figures:
        name = NAMES.get(f.name) or title(f.name.removesuffix("_s").removesuffix("_bytes"))
        told = _value(f.name, f.before), _value(f.name, f.after)
        rows.append((name, *told, _change(f)))
        worst = _value(f.name, f.worst_before), _value(f.name, f.worst_after)
        if worst != told:
            rows.append((LARGEST, *worst, ""))
    return rows


def _figures(figures: Sequence[Figure]) -> Iterator[Text]:
    rows = _rows(figures)
    name_wide, *wide = (max(len(row[n]) for row in rows) for n in range(4))
    for number, (name, *cells) in enumerate(rows):
        line = name.ljust(name_wide)
        line += "".join(f"   {cell:>{room}}" for cell, room in zip(cells, wide, strict=True))
        yield Text(line.rstrip(), "dim" if name == LARGEST else "" if number else "bold")


def _value(name: str, value: float) -> str:
    if name.endswith("_s"):
        return duration(value)
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_percent"):
        return f"{value:.2g} %" if value < 100 else f"{value:.0f} %"
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}".replace(",", " ")


def _change(figure: Figure) -> str:
    """In percent, where the two are alike enough for one. Of a count it is how many more, of a
    percentage the difference: neither is measured in itself."""
    difference, ratio = figure.after - figure.before, figure.ratio
    if not difference:
        return "same"
    if figure.name.endswith("_percent"):
        return f"{difference:+.1f} points" if abs(difference) >= 0.05 else "same"
    if not figure.name.endswith(("_s", "_bytes")):
        return ("+" if difference > 0 else "-") + _value(figure.name, abs(difference))
    if ratio is None:
        return ""
    if ratio >= TIMES_FROM:
        return f"x {ratio:.3g}" if ratio < TIMES_UNTIL else f"x {TIMES_UNTIL} or more"
    return f"{100 * (ratio - 1):+.1f} %" if abs(ratio - 1) >= 0.0005 else "same"


def size(number: float) -> str:
    """`512 B`, `3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
