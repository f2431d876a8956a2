"""Runs commands of Python by forking a Python that has torch imported already."""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("preloaded_python.py")
ROOM = 1 << 14
"""For the environment of what is forked."""

LAST_WORDS_S = 15

FORKED_LIMIT_S = 60
"""What is forked begins at once; a test in which torch stands still is soon tried again."""

POSSIBLE = sys.platform == "linux" and sys.implementation.name == "cpython"
"""Whether such a Python can be made here."""

fresh = False
"""Whether every process is started anew: with `pytest --fresh`, and where a test is tried again."""


def preloaded() -> Preloaded | None:
    """The one of this process; None where there is to be none."""
    return _started() if POSSIBLE and not fresh else None


@cache
def _started() -> Preloaded:
    return Preloaded()


class Preloaded:
    """A Python that waits to be forked (see `preloaded_python.py`). It ends with this process."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"OMP_NUM_THREADS": "1", "PRELOADED_PADDING": "x" * ROOM}
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(SERVER), str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._channel.close)

    def run(
        self, words: Sequence[str], *, cwd: Path, environment: dict[str, str], limit_s: float
    ) -> tuple[int, str]:
        """Exit status and output of a command that begins with this Python.

        Raises:
            AssertionError: it did not end in that time.
        """
        mine, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        order = {"words": [*words[1:]], "environ": environment, "cwd": str(cwd), "session": True}
        files = array.array("i", [nothing, theirs, theirs])
        self._channel.sendmsg(
            [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        )
        os.close(theirs)
        os.close(nothing)
        pid = json.loads(self._channel.recv(100))
        with open(mine, "rb", buffering=0) as file:
            printed, late = _read(file.fileno(), pid, limit_s)
        status = json.loads(self._channel.recv(100))
        if late:
            raise AssertionError(f"still running after {limit_s} s:\n{printed[-4000:]}")
        return status, printed


def _read(file: int, pid: int, limit_s: float) -> tuple[str, bool]:
    """What a process prints until it and all its children have ended; whether it was ended."""
    printed = bytearray()
    deadline = time.monotonic() + limit_s
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        while (left := deadline - time.monotonic()) > 0:
            if select.select([file], [], [], left)[0]:
                new = os.read(file, 1 << 16)
                if not new:
                    return printed.decode(errors="replace"), number is not signal.SIGTERM
                printed += new
        if number:
            # The doctor ends the ranks, which stand in sessions of their own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        deadline = time.monotonic() + LAST_WORDS_S
    return printed.decode(errors="replace"), True
