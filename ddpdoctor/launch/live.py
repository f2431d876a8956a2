"""What is shown of a run while it goes on: findings as they are made, and how far it is.

On a terminal a table; else a line in the log every half a minute, with findings where they are
asked for (`--live`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..monitor.findings_so_far import FindingsSoFar
from ..report import registry
from ..run import Run
from ..storage.run_folder import RunFolder

if TYPE_CHECKING:
    from ..config import Options

Show = Callable[[Run], None]


@contextlib.contextmanager
def shown(
    folder: RunFolder,
    options: Options,
    say: Callable[[str], None],
    *,
    leads: bool = True,
    table: bool = True,
) -> Iterator[Show | None]:
    """What shows a run, to be called about once a second; None where it is not wanted.

    Args:
        leads: the records of all ranks come to this node, so that findings can be told.
        table: it may be drawn where stderr is a terminal.
    """
    with contextlib.ExitStack() as until:
        show = None
        if options.live is not False and not options.quiet:
            with contextlib.suppress(Exception):  # the run is worth more than its view
                show = _show(folder, options, say, leads, table, until)
        yield show


def _show(
    folder: RunFolder,
    options: Options,
    say: Callable[[str], None],
    leads: bool,
    table: bool,
    until: contextlib.ExitStack,
) -> Show | None:
    from ..render.live import LiveView, LogLines, told
    from ..render.streams import is_terminal

    terminal = is_terminal(sys.stderr)
    if terminal and not table and not options.live:
        return None
    looks: FindingsSoFar | None = None
    if leads and (terminal or options.live):  # a log that nobody watches is to cost nothing
        checks = registry.select(options.select, options.ignore)
        looks = FindingsSoFar(folder, checks, options.unwanted())
        looks.start()
        until.callback(looks.close)
    if terminal and table:
        update = until.enter_context(LiveView(folder.path)).update
    else:
        update = LogLines(say).update

    def show(run: Run) -> None:
        for finding, made in looks.take() if looks else ():
            say(told(finding) if made else f"no longer found: {finding.code} {finding.check}")
        update(run, looks.found if looks else None)

    return show
