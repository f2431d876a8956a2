"""Report on a run from its folder, also if the run was killed.

Several folders are the nodes of one run. Exit status: 3 if --fail-on was reached, 2 if a folder
cannot be used, else 0.
"""

from __future__ import annotations

import argparse
import sys

from .. import render
from ..config import resolve
from ..render import streams
from ..report.postmortem import Attempts, open_run
from ..report.registry import select
from ..storage.run_folder import FolderError
from .parsers import EXAMINING, add_settings, given
from .split import UsageError

FAILED_ON = 3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="RUN_DIR", help="a run folder")
    parser.add_argument(
        "--format",
        choices=("text", *render.FORMATS),
        default="text",
        help="format of the report on stdout (default: text)",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="show the timeline of one rank instead"
    )
    add_settings(parser, EXAMINING)


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    args = parser.parse_args(argv)
    if args.rank is not None and args.format != "text":
        raise UsageError(f"--rank prints text only: omit --format {args.format}")
    options = resolve(given(args))
    checks = select(options.select, options.ignore)
    attempts = open_run(args.folders)
    report = attempts.report(checks)
    for name, write in (("json", render.write_json), ("html", render.write_html)):
        if path := getattr(args, name, None):
            try:
                write(report, path)
            except OSError as error:
                raise UsageError(f"--{name}: cannot write {path} ({error.strerror})") from error
    if args.rank is not None:
        streams.emit(_story(attempts, args.rank), sys.stdout)
    elif args.format == "text":
        styled = streams.is_terminal(sys.stdout)
        width = streams.width_of(sys.stdout)
        streams.emit(render.text(report, width, styled=styled), sys.stdout)
    else:
        streams.emit(render.FORMATS[args.format](report), sys.stdout)
    return FAILED_ON if options.fails(report.worst()) else 0


def _story(attempts: Attempts, number: int) -> str:
    if not any(number in run.ranks for run in attempts.runs):
        from ..run import fold_ranks

        known = fold_ranks(r for run in attempts.runs for r in run.ranks)
        raise FolderError(f"rank {number} left no record; recorded ranks: {known}")
    stacks = [
        path
        for folder in attempts.folders
        for run in attempts.runs
        for path in folder.stacks_files(number, run.attempt)
    ]
    width = streams.width_of(sys.stdout)
    runs = [run for run in attempts.runs if number in run.ranks]
    return render.story(runs, number, stacks, width, styled=streams.is_terminal(sys.stdout))
