"""The pages of `ddpdoctor explain`: a check's docstring, and the table of all checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.text import Text

from ..report.findings import Check, Effect
from .safe_text import wrap
from .terminal import STYLES, captured, make_console, show

HEADINGS = ("What it finds", "How it knows", "Why it hurts", "How to fix it", "When it stays quiet")

_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_RULE = re.compile(r"[-=~]{3,}")


def page(check: Check, checks: Sequence[Check], width: int, *, styled: bool) -> str:
    """The docstring as a page, wrapped to the width; code stays as it is. `checks`: all of them,
    for those whose findings explain this one's."""
    console = make_console(StringIO(), width, styled)
    head = Text.assemble(
        (f"{check.code} {check.name}", "bold"),
        "   ",
        (check.severity.value, STYLES[check.severity]),
        f"   {check.family}",
    )
    show(console, head)
    show(console, Text())
    for line in _body(inspect.cleandoc(type(check).__doc__ or ""), min(width, 100)):
        show(console, line)
    effects = ((", ".join(effect.checks), effect) for effect in check.effects)
    causes = ((c.name, e) for c in checks for e in c.effects if check.name in e.checks)
    lists = {
        "Rules": [f"{rule}: {when}" for rule, when in check.rules.items()],
        "What follows from it": [_effect(*entry) for entry in effects],
        "What it may follow from": [_effect(*entry) for entry in causes],
    }
    for title, items in lists.items():
        if items:
            show(console, Text(f"\n{title}", "bold"))
        for item in items:
            for line in _flow([f"- {item}"], min(width, 100)):
                show(console, line)
    return captured(console)


def _effect(names: str, effect: Effect) -> str:
    return f"{names}: {words}" if (words := effect.describe()) else names


def index(checks: Sequence[Check], width: int, *, styled: bool) -> str:
    """All checks, by family."""
    console = make_console(StringIO(), width, styled)
    broad = max((len(c.name) for c in checks), default=0)
    family = ""
    for check in checks:
        if check.family != family:
            show(console, Text(f"{chr(10) if family else ''}{check.family}", "bold"))
            family = check.family
        lead = f"  {check.code}  {check.name:<{broad}}  "
        severity = f"{check.severity.value:<7}  "
        room = max(width - len(lead) - len(severity), 20)
        first, *rest = wrap(_summary(check), room)
        show(console, Text.assemble(lead, (severity, STYLES[check.severity]), first))
        for line in rest:
            show(console, Text(" " * (len(lead) + len(severity)) + line))
    show(console, Text("\nddpdoctor explain NAME says more of each", "dim"))
    return captured(console)


def _summary(check: Check) -> str:
    paragraph = inspect.cleandoc(type(check).__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _body(text: str, width: int) -> Iterator[Text]:
    block: list[str] = []
    fenced = False
    for line in [*text.split("\n"), ""]:
        fence = line.lstrip().startswith("```")
        heading = _heading(line)
        if fenced or fence or (line.startswith("    ") and not block):
            yield from _flow(block, width)
            block = []
            fenced ^= fence
            yield Text(line)
        elif heading or not line.strip() or _RULE.fullmatch(line.strip()):
            yield from _flow(block, width)
            block = []
            if heading:
                yield Text(heading, "bold")
            elif not line.strip():
                yield Text()
        elif block and _ITEM.match(line) and (_ITEM.match(block[0]) or block[-1].endswith(":")):
            yield from _flow(block, width)
            block = [line]
        else:
            block.append(line)


def _heading(line: str) -> str:
    plain = line.strip().strip("#*_").strip().rstrip(":").strip("*_")
    return plain if plain.lower() in (h.lower() for h in HEADINGS) else ""


def _flow(lines: list[str], width: int) -> Iterator[Text]:
    """A paragraph or a list item as one flow."""
    if not lines:
        return
    item = _ITEM.match(lines[0])
    first = item.group() if item else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    hang = " " * len(first)
    words = " ".join([lines[0][len(first) :], *(line.strip() for line in lines[1:])])
    for number, line in enumerate(wrap(words, width - len(first))):
        yield Text(f"{hang if number else first}{line}")
