"""Before training: do all ranks see the same software, environment and devices, can they reach
each other, how fast are the collectives.

Takes the options of torchrun that the training will be launched with, and no script. Exit status:
4 where the other nodes did not come (within --hang-after, 120 s where that is left out),
3 where an error was found (see --fail-on), else as of ddpdoctor run.
"""

from __future__ import annotations

import argparse
import dataclasses

from ..config import SETTINGS
from ..report.findings import Severity
from .parsers import add_settings
from .run_command import prepared
from .split import UsageError, split

PROGRAM = "ddpdoctor.launch.preflight"
GATHERS_S = 120.0
"""So long its ranks wait for each other as well."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ddpdoctor preflight [doctor options] [torchrun options]"
    add_settings(parser, tuple(s.name for s in SETTINGS))


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    parts = split(argv)
    if parts.help:
        parser.print_help()
        return 0
    if parts.command:
        raise UsageError(
            f"preflight runs no script; type ddpdoctor preflight, or ddpdoctor run "
            f"{parts.command[0]}"
        )
    if taken := parts.flags & {"-m", "--module", "--no-python", "--run-path"}:
        raise UsageError(f"preflight runs no script, so {min(taken)} has no meaning; leave it out")
    options = prepared(parts)
    changed = dataclasses.replace(
        options,
        quiet=options.quiet or "quiet" not in parts.doctor,
        fail_on=options.fail_on if "fail_on" in parts.doctor else Severity.ERROR.value,
    )
    from .. import launch

    patience = None if options.on_hang == "report" else options.hang_after or GATHERS_S
    return launch.run(changed, [*parts.launcher, "-m", PROGRAM], gathers_s=patience)
