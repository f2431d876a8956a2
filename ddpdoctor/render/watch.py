"""`ddpdoctor watch` on a terminal of its own."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence

from rich.live import Live
from rich.text import Text

from ..report.findings import Finding
from ..run import Recording
from ..run.liveness import goes_on, note_alive
from .live import snapshot
from .terminal import make_console

PERIOD_S = 1.0
PATIENCE = 5
"""Looks without any process of the run before it is given up."""


def watch(recording: Recording, findings: Callable[[], Sequence[Finding]]) -> None:
    """Redraw until the run has ended.

    Args:
        findings: those so far.
    """
    folder = str(recording.folder.path)
    size = shutil.get_terminal_size((80, 24))
    console = make_console(sys.stdout, size.columns, styled=True)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        gone = 0
        while True:
            attempt = recording.folder.attempts()[-1]
            run = recording.refresh(attempt)
            note_alive(run)
            gone = 0 if goes_on(run) else gone + 1
            size = shutil.get_terminal_size((80, 24))
            content = snapshot(
                run,
                folder,
                size.columns,
                size.lines - 2,
                styled=True,
                gone=gone >= PATIENCE,
                findings=findings(),
            )
            live.update(Text.from_ansi(content, no_wrap=True), refresh=True)
            if run.info.ended_at is not None or gone >= PATIENCE:
                return
            time.sleep(PERIOD_S)
