"""Explain a check: what it finds, how it knows, how to fix it; without a name, list all checks."""

from __future__ import annotations

import argparse
import difflib
import sys

from .. import render
from ..render import streams
from ..report import registry
from .split import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "check",
        nargs="?",
        metavar="CHECK",
        help="a name, a code, the beginning of a code or a family; default: all checks",
    )


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    word = parser.parse_args(argv).check
    width, styled = streams.width_of(sys.stdout), streams.is_terminal(sys.stdout)
    if word is None:
        content = render.index_of(registry.all_checks(), width, styled=styled)
    elif check := registry.find(word):
        content = render.page_of(check, registry.all_checks(), width, styled=styled)
    elif word.lower() in registry.FAMILIES or _is_prefix(word):
        content = render.index_of(registry.select((word,)), width, styled=styled)
    else:
        raise UsageError(_unknown(word))
    streams.emit(content, sys.stdout)
    return 0


def _is_prefix(word: str) -> bool:
    upper = word.upper()
    return upper.startswith("DDP") and any(c.code.startswith(upper) for c in registry.all_checks())


def _unknown(word: str) -> str:
    checks = registry.all_checks()
    lower = word.lower()
    if len(words := word.replace(",", " ").split()) > 1 and all(map(registry.find, words)):
        return f"one check at a time: type ddpdoctor explain {words[0]}"
    near = [c.code for c in checks if lower.isdecimal() and c.code == f"DDP{lower}"]
    near += difflib.get_close_matches(lower, [c.name for c in checks], 3, 0.5)
    near += difflib.get_close_matches(word.upper(), [c.code for c in checks], 2, 0.7)
    near += [c.name for c in checks if len(lower) > 2 and lower in c.name and c.name not in near]
    hint = f"similar: {', '.join(near[:4])}" if near else "ddpdoctor explain lists all checks"
    return f"no check is called {word!r}; {hint}"
