"""Live view of a running run: how far it is, findings so far, one row per rank, until it ends or
Ctrl-C.

If stdout is not a terminal, the table is printed once.
"""

from __future__ import annotations

import argparse
import sys

from .. import render
from ..render import streams
from ..report import registry
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
    from ..monitor.findings_so_far import FindingsSoFar
    from ..render.watch import watch

    looks = FindingsSoFar(folder, registry.all_checks(), first_s=0.0)
    looks.start()
    try:
        watch(recording, lambda: looks.found)
    except KeyboardInterrupt:
        print(f"stopped watching; the run continues. ddpdoctor report {folder.path}")
    finally:
        looks.close()
    return 0
