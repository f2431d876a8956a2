"""Before training: check that all ranks have the same software, environment and devices and can
reach each other, and measure how fast collectives are.

Takes the torchrun options that the training will be launched with, and no script. Exit status:
4 if the other nodes did not arrive (within --hang-after, by default 120 s), 3 if an error was
found (see --fail-on), else that of ddpdoctor run.
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
"""How long nodes wait for each other; its ranks wait as long (`launch.preflight.TIMEOUT_S`)."""


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
        raise UsageError(f"preflight runs no script, so {min(taken)} has no meaning; omit it")
    options = prepared(parts)
    changed = dataclasses.replace(
        options,
        quiet=options.quiet or "quiet" not in parts.doctor,
        fail_on=options.fail_on if "fail_on" in parts.doctor else Severity.ERROR.value,
    )
    from .. import launch

    patience = None if options.on_hang == "report" else options.hang_after or GATHERS_S
    return launch.run(changed, [*parts.launcher, "-m", PROGRAM], gathers_s=patience)
