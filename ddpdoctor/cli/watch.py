"""Live view of a running run, one row per rank, until it ends or Ctrl-C.

If stdout is not a terminal, the table is printed once.
"""

from __future__ import annotations

import argparse
import sys

from .. import render
from ..render import streams
from ..report.postmortem import usable
from ..run import Recording
from ..run.liveness import goes_on, note_alive


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN_DIR", help="the run folder")


def main(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    folder = usable(parser.parse_args(argv).folder)
    recording = Recording(folder)
    if not streams.is_terminal(sys.stdout):
        run = recording.refresh(folder.attempts()[-1])
        note_alive(run)
        text = render.now(run, str(folder.path), streams.PLAIN_WIDTH, gone=not goes_on(run))
        streams.emit(text, sys.stdout)
        return 0
    from ..render.watch import watch

    try:
        watch(recording)
    except KeyboardInterrupt:
        print(f"stopped watching; the run continues. ddpdoctor report {folder.path}")
    return 0
