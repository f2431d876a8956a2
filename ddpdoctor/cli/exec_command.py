"""Examine a run that another launcher starts: a script that calls mp.spawn, accelerate launch,
srun, mpirun or plain torchrun.

The exit status is that of ddpdoctor run.
"""

from __future__ import annotations

import argparse
import shutil

from ..config import SETTINGS
from .parsers import add_settings
from .run_command import prepared
from .split import UsageError, split


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ddpdoctor exec [doctor options] -- COMMAND ..."
    add_settings(parser, tuple(s.name for s in SETTINGS))


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    parts = split(argv, launcher={})
    if parts.help:
        parser.print_help()
        return 0
    if not parts.command:
        raise UsageError("no command to run; type ddpdoctor exec [options] -- COMMAND ...")
    program = parts.command[0]
    if shutil.which(program) is None:
        hint = f"; type python {program}" if program.endswith(".py") else ""
        raise UsageError(f"no such program: {program}{hint}")
    options = prepared(parts)
    from .. import launch

    return launch.exec_command(options, list(parts.command))
