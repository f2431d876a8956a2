"""Look at a job that was started without the doctor and hangs or is slow now: the stacks of all its
ranks on this node, merged, and who is not where the others are. Changes nothing in the job.

Without a PID, all distributed jobs of this user on this node; else those that these launchers or
ranks belong to. Needs py-spy (`pip install 'ddpdoctor[attach]'`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..attach import jobs, records, stacks
from ..attach.text import show
from ..storage.run_folder import write_private
from .split import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pids", nargs="*", type=int, metavar="PID", help="a launcher, or a rank of a job"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="look for as long, about once a second, at least twice (default: 1)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write what was seen there; `ddpdoctor report` reads the files of several nodes",
    )


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    args = parser.parse_args(argv)
    if not 0 < args.seconds <= 60:
        raise UsageError(f"--seconds: {args.seconds:g} is not between 0 and 60")
    try:
        found = jobs.find(args.pids)
    except ProcessLookupError as error:
        raise UsageError(str(error)) from error
    except PermissionError as error:
        raise UsageError(stacks.PERMISSION.format(whom=error)) from error
    if not found.jobs:
        where = "among these processes" if args.pids else "of yours runs on this node"
        raise UsageError(
            f"no distributed job {where} (ranks have RANK and WORLD_SIZE in their environment); "
            "for ranks of mp.spawn type the pid of the program that started them"
        )
    for pid in found.unrelated:
        print(f"ddpdoctor: process {pid} is no rank and started none: left out", file=sys.stderr)
    try:
        seen = tuple(s for job in found.jobs if (s := stacks.look(job, args.seconds)) is not None)
    except stacks.NotReadable as error:
        raise UsageError(str(error)) from error
    if not seen:
        raise UsageError("all ranks have ended while they were looked at")
    if args.json:
        try:
            write_private(args.json, records.write(seen))
        except OSError as error:
            raise UsageError(f"--json: cannot write {args.json} ({error.strerror})") from error
    show(seen)
    return 0
