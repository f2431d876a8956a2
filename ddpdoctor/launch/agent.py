"""torchrun itself, in a process of its own: `python -m ddpdoctor.launch.agent -- ARGS`.

Parser, rendezvous, restarts, redirections and exit status are torchrun's own. This module only
sets the probe's variables for the ranks and records when their processes start and end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

from .agent_orders import VARIABLE, Orders

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Get SIGTERM when the process `parent` (the supervisor) ends, so that no rank is left."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


def main() -> None:
    text = os.environ.pop(VARIABLE, None)
    if text is None or sys.argv[1:2] != ["--"]:
        sys.exit("ddpdoctor.launch.agent is started by `ddpdoctor run`, not directly")
    orders = Orders.from_text(text)
    die_with(orders.supervisor)
    if orders.safe_path is None:
        os.environ.pop("PYTHONSAFEPATH", None)
    os.environ.update(orders.environment)
    sys.argv = ["torchrun", *sys.argv[2:]]

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from .meeting import Meeting
    from .worker_watch import Observer

    observer = Observer(Path(orders.node_file), orders.supervisor)
    observer.install()
    meeting = Meeting(Path(orders.node_file).parent)
    if orders.several:
        meeting.install()
    status = 1  # as an exception that nobody catches
    try:
        run.main(sys.argv[1:])
        status = 0
    except Exception as error:
        if isinstance(error, ChildFailedError):
            observer.failed(error)
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(message_of(error))
            sys.stderr.flush()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        meeting.end(status)
    sys.exit(status)


def message_of(error: Exception) -> str:
    """What to print of an exception that ends torchrun.

    Its frames are in torchrun and in this file, never in the user's program, so they are printed
    only for failures that torchrun does not foresee.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if os.environ.get("DDPDOCTOR_DEBUG"):
        return "".join(traceback.format_exception(error))
    if isinstance(error, ChildFailedError):
        return f"{str(error).strip()}\n"
    if type(error).__name__ == "SignalException":
        return ""  # torchrun has said so when it came
    if isinstance(error, RendezvousError | DistError | ValueError | OSError):
        return f"torchrun: {type(error).__name__}: {' '.join(str(error).split())}\n"
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__") in ("__main__", __name__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before torchrun's own handler was there
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
