"""Compare two runs: findings that are new, gone or unchanged, step time and other figures.

Both runs are diagnosed again, with the same checks."""

from __future__ import annotations

import argparse
import sys

from .. import render
from ..config import resolve
from ..render import page, streams
from ..report.comparison import compare
from ..report.postmortem import open_run
from ..report.registry import select
from .parsers import add_settings, given


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="RUN_A", help="folder of the first run")
    parser.add_argument("after", metavar="RUN_B", help="folder of the second run")
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "html"),
        default="text",
        help="format of the comparison on stdout (default: text)",
    )
    add_settings(parser, ("select", "ignore"))


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    args = parser.parse_args(argv)
    options = resolve(given(args))
    checks = select(options.select, options.ignore)
    before, after = (open_run([path]).report(checks) for path in (args.before, args.after))
    change = compare(before, after)
    if args.format == "html":
        content = page.comparison(change)
    elif args.format == "markdown":
        content = render.comparison_markdown(change)
    else:
        width, styled = streams.width_of(sys.stdout), streams.is_terminal(sys.stdout)
        content = render.comparison(change, width, styled=styled)
    streams.emit(content, sys.stdout)
    return 0
