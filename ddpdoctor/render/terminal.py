"""A report for the console, in the anatomy of a compiler's message.

Everything that comes from a run goes through `words` and into `Text`, never into markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import TextIO

import msgspec
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..report.findings import Finding, Report, Severity
from ..run import Location, counted
from . import report_text
from .report_text import Grid, Proof
from .safe_text import clean, clean_lines, cut, fit, paragraphs, wrap

SOURCE_LIMIT = 400
EVIDENCE_LINES = 8
"""Lines of evidence shown for a finding."""
SAID_ALREADY = frozenset({"group", "call_number", "differs"})
"""Evidence of a call in which ranks differ, where it has all of these: the first line of the
finding and the table of the calls say the same."""
STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
STATES = {"failed": "red", "killed": "red", "hung": "red", "lost": "yellow", "running": "green"}


def render(
    report: Report, width: int, *, styled: bool = False, quiet: bool = False, saved: bool = True
) -> str:
    """The report as text of that width; without `styled` it holds no escapes."""
    console = make_console(StringIO(), width, styled)
    for part in _report(report, console.width, quiet, saved):
        show(console, part)
    return captured(console)


def make_console(file: TextIO, width: int, styled: bool) -> Console:
    """A console that takes nothing from what it prints: no markup, emoji or highlighting."""
    return Console(
        file=file,
        width=max(width, 40),
        force_terminal=styled,
        color_system="auto" if styled else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def captured(console: Console) -> str:
    file = console.file
    assert isinstance(file, StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def show(console: Console, part: RenderableType) -> None:
    """Print one part; lines are wrapped already, so rich must not cut into them."""
    console.print(part, soft_wrap=isinstance(part, Text))


def _report(report: Report, width: int, quiet: bool, saved: bool) -> Iterator[RenderableType]:
    if not quiet:
        yield from head(report, width)
    for finding in report.findings:
        yield from about(finding, width)
        yield Text()
    if not quiet:
        yield from ranks(report, width)
        yield from foot(report, width, saved)


def head(report: Report, width: int) -> Iterator[RenderableType]:
    """What was run, and how it ended."""
    for number, line in enumerate(report_text.headline(report)):
        yield from _wrapped(line, width, "bold" if number == 0 else "")
    yield Text()


def ranks(report: Report, width: int) -> Iterator[RenderableType]:
    """How each rank ended, and the facts worth showing."""
    if report.ranks:
        yield rank_table(report_text.rank_grid(report), width)
        yield Text()
    for shown in report_text.tables(report):
        yield from _wrapped(shown.title, width, "bold")
        yield from grid(shown, width, "")
        yield Text()


def foot(report: Report, width: int, saved: bool = True) -> Iterator[RenderableType]:
    """The count, what was not examined, the doctor's own cost, and what the run ran on: in one line
    where there is no finding to be reported with it."""
    style = "" if report.findings else "bold"
    for line in report_text.verdict(report):
        yield from _wrapped(line, width, style)
    for line in report_text.suppressed(report):
        yield from _wrapped(line, width, "", hang=2)
    for line in report_text.gaps(report, saved=saved):
        yield from _wrapped(line, width, "dim", hang=2)
    yield from _wrapped(report_text.overhead(report), width, "dim")
    machines = report_text.machines(report)
    if report.findings:
        for line in machines:
            yield from _wrapped(line, width, "dim", hang=2)
    elif machines:  # what differs from one machine to the next comes first, the versions may be cut
        yield Text(cut("; ".join([*machines[1:], machines[0]]), width), "dim")


def rank_table(grid: Grid, width: int) -> Table:
    """One row per rank; what does not fit is cut in the last column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    sizes = report_text.widths(grid)[:-1]
    # Cut here: rich would take the room for a long cell from the columns before it.
    room = max(width - sum(size + 2 for size in sizes), len(grid.columns[-1]))
    for name, size in zip(grid.columns, (*sizes, len(grid.columns[-1])), strict=True):
        right = name in ("steps", "step time", "waits", "memory")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, min_width=size)
    for row in grid.rows:
        state = row[1].partition(" ")[0] if len(row) > 1 else ""
        cells = [Text(cell) for cell in (*row[:-1], cut(row[-1], room))]
        if state in STATES:
            cells[1].stylize(STATES[state])
        table.add_row(*cells)
    if grid.more:
        table.add_row(Text(f"and {grid.more} more"))
    return table


def about(finding: Finding, width: int, *, whole: bool = False) -> Iterator[Text]:
    """One finding, location first, ending in something to do; `whole`: with all its evidence."""
    code, sentence = report_text.first_line(finding)
    first, *rest = wrap(f"{code} {sentence}", width - 2, width)
    opening = Text(first, "bold")
    opening.stylize(STYLES[finding.severity], 0, len(code))
    yield opening
    yield from (Text(f"  {line}", "bold") for line in rest)
    for number, line in enumerate(_row(report_text.whereabouts(finding), width - 6)):
        yield Text.assemble(("      " if number else "  --> ", "bold blue"), line)
    yield from _source(finding, width)
    if text := report_text.subjects(finding):
        yield from _labelled("concerns", text, width)
    yield from _labelled("cause", finding.cause, width)
    if text := report_text.differed(finding):
        yield from _labelled("ranks differ before", text, width)
    yield from _labelled(f"help ({finding.fix_kind.value})", finding.fix, width)
    for effect in finding.consequences:
        text = f"{clean(effect.code, 20)} {clean(effect.check, 60)}: {clean(effect.summary, 500)}"
        yield from _labelled("follows from it", text, width)
    yield from _evidence(finding, width, whole=whole)
    if rule := report_text.rule(finding):
        yield from _labelled("rule", rule, width)
    yield from _labelled("explain", report_text.explain_command(finding), width)


def _evidence(finding: Finding, width: int, *, whole: bool) -> Iterator[Text]:
    """The first lines of the evidence; the page and `findings.json` have the rest."""
    if not whole and finding.evidence.keys() >= SAID_ALREADY:
        kept = {k: v for k, v in finding.evidence.items() if k not in SAID_ALREADY}
        finding = msgspec.structs.replace(finding, evidence=kept)
    proofs = report_text.proofs(finding, whole=whole)
    lines = [line for proof in proofs for line in _proof(proof, width)]
    yield from lines if whole else lines[:EVIDENCE_LINES]
    if not whole and (more := len(lines) - EVIDENCE_LINES) > 0:
        yield Text(f"       {counted(more, 'more line')}: see `--html` or findings.json", "dim")


def _row(parts: list[str], width: int) -> list[str]:
    """Parts side by side, as many as fit on a line."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + 3 + cell_len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines


def _source(finding: Finding, width: int) -> Iterator[Text]:
    """The lines of the user's code, each once, the first one underlined with what is wrong
    there."""
    here = [(finding.location, finding.label)] if finding.location else []
    labels: dict[tuple[str, int], list[str]] = {}
    places: dict[tuple[str, int], Location] = {}
    for place, label in (*here, *((r.location, r.label) for r in finding.related)):
        key = place.file, place.line
        places.setdefault(key, place)
        if label and label not in labels.setdefault(key, []):
            labels[key].append(label)
    if not places:
        return
    gutter = max(len(str(line)) for _, line in places)
    file = finding.location.file if finding.location else ""
    first = (finding.location.file, finding.location.line) if finding.location else None
    for key, place in places.items():
        label, mark = "; ".join(labels.get(key, ())), "^" if key == first else "-"
        if place.file != file:
            yield Text.assemble((f"{'':>{gutter}} ::: ", "bold blue"), clean(str(place)))
            file = place.file
        if place.source:
            style = STYLES[finding.severity] if mark == "^" else "bold blue"
            yield from _underlined(place, label, mark, gutter, width, style)
        elif label:
            for number, line in enumerate(wrap(clean(label), width - gutter - 3)):
                at = place.line if not number else ""
                yield Text.assemble((f"{at:>{gutter}} | ", "bold blue"), line)


def _underlined(
    place: Location, label: str, mark: str, gutter: int, width: int, style: str
) -> Iterator[Text]:
    bar = f"{'':>{gutter}} | "
    source = clean_lines(place.source, SOURCE_LIMIT)[0]
    indent = min(len(source) - len(source.lstrip()), 12)
    code = fit(source.strip(), width - len(bar) - indent)
    yield Text.assemble((f"{place.line:>{gutter}} | ", "bold blue"), " " * indent + code)
    under = mark * max(cell_len(code), 1)
    text = clean(label)
    if not text or len(bar) + indent + len(under) + 1 + cell_len(text) <= width:
        line = f"{' ' * indent}{under} {text}".rstrip()
        yield Text.assemble((bar, "bold blue"), (line, style))
        return
    yield Text.assemble((bar, "bold blue"), (" " * indent + under, style))
    for line in wrap(text, max(width - len(bar) - indent, 20)):
        yield Text.assemble((bar, "bold blue"), (" " * indent + line, style))


def _proof(proof: Proof, width: int) -> Iterator[Text]:
    if proof.grid:
        yield from _labelled("evidence", f"{proof.name}:", width)
        yield from grid(proof.grid, width, "       ")
    elif proof.block:
        yield from _labelled("evidence", f"{proof.name}:", width)
        yield from (Text(f"       {line}") for line in clean_lines(proof.block))
    else:
        yield from _labelled("evidence", f"{proof.name}: {proof.line}", width)


def grid(shown: Grid, width: int, indent: str) -> Iterator[Text]:
    """A table by columns where it fits the page, else row by row."""
    sizes = report_text.widths(shown)
    if len(indent) + sum(sizes) + 2 * len(sizes) <= width + 2:
        for number, row in enumerate((shown.columns, *shown.rows)):
            cells = [c + " " * (size - cell_len(c)) for c, size in zip(row, sizes, strict=True)]
            yield Text(f"{indent}{'  '.join(cells)}".rstrip(), "" if number else "dim")
    else:
        for row in shown.rows:
            pairs = [
                f"{'rank' if name == 'ranks' and cell.isdecimal() else name} {cell}"
                for name, cell in zip(shown.columns, row, strict=True)
                if cell not in ("", "-")
            ]
            lines = wrap(", ".join(pairs), width - len(indent) - 2)
            yield from (Text(f"{indent}{'  ' * (i > 0)}{line}") for i, line in enumerate(lines))
    if shown.more:
        yield Text(f"{indent}and {shown.more} more")


def _labelled(label: str, text: str, width: int) -> Iterator[Text]:
    """`   = label: text`, wrapped under itself."""
    mark = f"   = {label}: "
    first, *rest = paragraphs(text, width - 7, max(width - len(mark), 20)) or [""]
    if first.startswith("    "):  # code keeps its own lines together
        first, rest = "", [first, *rest]
    yield Text.assemble((mark, "bold"), first)
    yield from (Text(f"       {line}".rstrip()) for line in rest)


def _wrapped(line: str, width: int, style: str, hang: int = 0) -> Iterator[Text]:
    for number, part in enumerate(wrap(line, width - hang, width)):
        yield Text(part if not number else " " * hang + part, style)
