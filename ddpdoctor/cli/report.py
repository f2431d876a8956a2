"""Report on a run from its folder, also if the run was killed.

Several folders are the nodes of one run. Exit status: 3 if --fail-on was reached, 2 if a folder
cannot be used, else 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import exporters, render
from ..attach import records
from ..config import Options, resolve
from ..leftovers import search
from ..leftovers.folder import write_folder
from ..render import page, streams
from ..report.findings import Check
from ..report.postmortem import Attempts, open_run
from ..report.registry import select
from ..run import fold_ranks, read_in
from ..storage.run_folder import FolderError, printable
from .parsers import EXAMINING, add_settings, given
from .split import UsageError

FAILED_ON = 3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="RUN_DIR",
        help="a run folder; a file of `attach --json`; or what a run without the doctor left "
        "behind: flight-recorder dumps, torchrun's --log-dir, logs",
    )
    parser.add_argument(
        "--format",
        choices=("text", "html", *render.FORMATS, *render.OF_RUNS),
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
    exporters.check(options.export)
    if not all(args.folders):
        raise UsageError("an empty path; give a run folder, or what a run left behind")
    paths = list(map(Path, args.folders))
    for path in paths:
        if not path.exists():
            raise FolderError(
                f"no such folder or file: {path}; `ddpdoctor run` prints the folder of each run"
            )
    if all(map(records.is_record, paths)):
        return _looks(args)
    left = None if any(map(search.is_run, paths)) else search.search(paths)
    if left is not None and not left.anything and (why := left.why_nothing(paths)):
        raise FolderError(why)
    if left is None or not left.anything:
        # JSON names files as the run's own findings.json does.
        as_recorded = args.format == "json" or hasattr(args, "json")
        with read_in("" if as_recorded else str(Path.cwd())):
            return _report(args, checks, options, args.folders)
    for line in left.told():
        print(f"ddpdoctor: {line}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as temporary:
        made = write_folder(Path(temporary) / "run", left).path
        return _report(args, checks, options, [made])


def _report(
    args: argparse.Namespace, checks: Sequence[Check], options: Options, folders: list[str | Path]
) -> int:
    attempts = open_run(folders)
    report = attempts.report(checks, options.unwanted())
    for name in ("json", "html"):
        path = getattr(args, name, None)  # absent where it was not given
        try:
            if path and name == "json":
                render.write_json(report, path)
            elif path:
                page.write(report, path, attempts.last)
        except OSError as error:
            raise UsageError(f"--{name}: cannot write {path} ({error.strerror})") from error
    width, styled = streams.width_of(sys.stdout), streams.is_terminal(sys.stdout)
    if args.rank is not None:
        content = _story(attempts, args.rank, width, styled)
    elif args.format == "text":
        content = render.text(report, width, styled=styled)
    elif args.format == "html":
        content = page.html(report, attempts.last)
    elif args.format in render.OF_RUNS:
        content = render.OF_RUNS[args.format](attempts.last, report)
    else:
        content = render.FORMATS[args.format](report)
    shown = ", ".join(args.folders)  # not the folder that was made of what was left behind
    streams.emit(content.replace(str(folders[0]), shown), sys.stdout)
    first = Path(args.folders[0])
    for line in exporters.export(report, options.export, first if first.is_dir() else Path()):
        print(f"ddpdoctor: {printable(line)}", file=sys.stderr)
    return FAILED_ON if options.fails(report.worst()) else 0


def _looks(args: argparse.Namespace) -> int:
    """The report on what `ddpdoctor attach --json` saw on one node or several."""
    from ..attach.text import show

    if args.format != "text" or args.rank is not None:
        raise UsageError("what attach saw is shown as text only: omit --format and --rank")
    show(records.read([Path(name) for name in args.folders]))
    return 0


def _story(attempts: Attempts, number: int, width: int, styled: bool) -> str:
    if not any(number in run.ranks for run in attempts.runs):
        known = fold_ranks(r for run in attempts.runs for r in run.everyone)
        raise FolderError(f"rank {number} left no record; recorded ranks: {known}")
    stacks = [
        path
        for folder in attempts.folders
        for run in attempts.runs
        for path in folder.stacks_files(number, run.attempt)
    ]
    runs = [run for run in attempts.runs if number in run.ranks]
    return render.story(runs, number, stacks, width, styled=styled)
