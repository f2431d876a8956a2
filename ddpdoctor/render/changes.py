"""Two runs side by side, for the console."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.text import Text

from ..comparison import Comparison, Figure
from ..findings import Finding
from . import facts
from .terminal import STYLES, captured, make_console, show
from .words import clean, duration, title, wrap


def render(change: Comparison, width: int, *, styled: bool) -> str:
    console = make_console(StringIO(), width, styled)
    for name, report in (("before", change.before), ("after", change.after)):
        head = facts.headline(report)
        show(console, Text.assemble((f"{name:<7}", "bold"), head[1]))
        command = shlex.join(report.run.command) or "command unknown"
        show(console, Text(f"       {clean(command, 200)}", "dim"))
        show(console, Text(f"       {clean(report.run.folder)}", "dim"))
    for reason in change.unlike:
        for n, part in enumerate(wrap(clean(reason), width - 8)):
            show(console, Text(f"{'' if n else 'differs':<8}{part}", "yellow"))
    if not (change.appeared or change.went or change.stayed):
        show(console, Text("\nno findings in either run"))
    groups = (("appeared", change.appeared), ("went", change.went), ("stayed", change.stayed))
    for name, findings in groups:
        for line in _group(name, findings, width):
            show(console, line)
    if change.figures:
        show(console, Text())
        for line in _figures(change.figures):
            show(console, line)
    return captured(console)


def _group(name: str, findings: Sequence[Finding], width: int) -> Iterator[Text]:
    if not findings:
        return
    yield Text(f"\n{name} ({len(findings)})", "bold")
    for finding in findings:
        code, sentence = facts.first_line(finding)
        first, *rest = wrap(f"{code} {sentence}", width - 4, width - 2)
        opening = Text(f"  {first}")
        opening.stylize(STYLES[finding.severity], 2, 2 + len(code))
        yield opening
        yield from (Text(f"    {line}") for line in rest)
        if finding.location:
            yield Text(f"    --> {clean(finding.location)}", "dim")


def _figures(figures: Sequence[Figure]) -> Iterator[Text]:
    yield Text(f"{'median over ranks':<22}{'before':>12}{'after':>12}{'change':>10}", "bold")
    for f in figures:
        name = title(f.name.removesuffix("_s").removesuffix("_bytes"))
        change = "" if f.change is None else "same" if not f.change else f"{f.change:+.1f} %"
        row = f"{name:<22}{_value(f.name, f.before):>12}{_value(f.name, f.after):>12}{change:>10}"
        yield Text(row)
        if (f.worst_before, f.worst_after) != (f.before, f.after):
            worst = f"{_value(f.name, f.worst_before):>12}{_value(f.name, f.worst_after):>12}"
            yield Text(f"{'  largest':<22}{worst}", "dim")


def _value(name: str, value: float) -> str:
    if name.endswith("_s"):
        return duration(value)
    if name.endswith("_bytes"):
        return size(value)
    return f"{value:.4g}" + (" %" if name.endswith("_percent") else "")


def size(number: float) -> str:
    """`512 B`, `3.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
