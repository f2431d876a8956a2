"""Text from a run made harmless and short: what stands in a record may be hostile or huge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from ..storage.run_folder import printable

_ZONE = re.compile(r"([+-]\d\d)(\d\d)$")

VALUE_LIMIT = 300
TEXT_LIMIT = 4000
LIST_LIMIT = 8
LINE_LIMIT = 30


def clean(value: object, limit: int = VALUE_LIMIT) -> str:
    """One line without control characters, cut where it is too long."""
    text = value if isinstance(value, str) else str(value)
    head = printable(text[: limit + 1])
    if len(text) <= limit:
        return head.strip() if "\n" in text else head
    return f"{head[:limit]}… ({len(text) - limit} more characters)"


def clean_lines(text: str, limit: int = TEXT_LIMIT, lines: int = LINE_LIMIT) -> list[str]:
    """The lines of a text, each harmless; both the text and their number are cut."""
    shown = text[:limit].expandtabs(4).strip("\n").split("\n")
    cut = len(text) > limit or len(shown) > lines
    kept = [printable(line).rstrip() for line in shown[:lines]]
    return [*kept, "… (cut)"] if cut else kept


def some(values: Iterable[object], limit: int = LIST_LIMIT) -> str:
    """`a, b, c and 37 more`."""
    every = list(values)
    shown_values = ", ".join(figure(v) for v in every[:limit])
    return shown_values if len(every) <= limit else f"{shown_values} and {len(every) - limit} more"


def figure(value: object) -> str:
    """A value as a person would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return some(value)
    if isinstance(value, dict):
        return some([f"{clean(k, 80)} ({figure(v)})" for k, v in value.items()])
    return clean(value)


def duration(seconds: float | None) -> str:
    """`3.2 ms`, `0.12 s`, `2 min 5 s`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def moment(text: str | None) -> datetime | None:
    """An ISO time (`2026-01-31T09:00:00+0100`); None where it is missing or no time."""
    with_colon = _ZONE.sub(r"\1:\2", text or "")  # which Python 3.10 wants
    try:
        return datetime.fromisoformat(with_colon)
    except ValueError:
        return None


def between(began: str, ended: str | None) -> float | None:
    """Seconds between two ISO times; None where one is missing or no time."""
    first, last = moment(began), moment(ended)
    if first is None or last is None or (first.tzinfo is None) != (last.tzinfo is None):
        return None
    return (last - first).total_seconds()


def title(name: str) -> str:
    """An evidence key as words."""
    return clean(name.replace("_", " "), 60)


_CODE = re.compile(r"`[^`\n]+`[^\s`]*|\S+")


def wrap(text: str, width: int, first: int | None = None) -> list[str]:
    """Lines of at most `width` columns, the first one of at most `first`.

    Code in backticks and long words stay in one piece.
    """
    from rich.cells import cell_len

    lines: list[str] = []
    line, room = "", width if first is None else first
    for word in _pieces(text, width):
        if line and cell_len(line) + 1 + cell_len(word) > room:
            lines.append(line)
            line, room = word, width
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _pieces(text: str, width: int) -> list[str]:
    """Words, and code in backticks; code longer than a line is better broken than lost."""
    return [
        part
        for piece in _CODE.findall(text)
        for part in (piece.split() if len(piece) > width else [piece])
    ]


def paragraphs(text: str, width: int, first: int | None = None) -> list[str]:
    """A text of several lines wrapped; indented lines are code and stay as they are."""
    lines: list[str] = []
    for line in clean_lines(text):
        room = first if not lines else None
        code = line.startswith(("    ", "```")) or not line.strip()
        lines += [line] if code else wrap(line, width, room)
    return lines


def fit(text: str, width: int) -> str:
    """A line of code cut at a word, where it is too long for the page."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= width:
        return text
    head = chop_cells(text, max(width - 2, 8))[0]
    at_word = head.rpartition(" ")[0]
    return f"{at_word if len(at_word) > width // 2 else head} …"


def cut(text: str, width: int) -> str:
    """A cell of a table cut where the column ends."""
    from rich.cells import cell_len, chop_cells

    return text if cell_len(text) <= width else f"{chop_cells(text, max(width - 1, 1))[0]}…"


def columns(rows: Sequence[dict[str, object]]) -> list[str]:
    """The keys of a table of dicts, in the order they are first seen."""
    return list(dict.fromkeys(key for row in rows for key in row))
