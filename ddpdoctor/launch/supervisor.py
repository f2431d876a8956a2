"""Waits for the launcher's process, and meanwhile runs the monitor and forwards signals."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TypeVar

import psutil

from ..monitor import system
from ..monitor.monitor import Monitor
from ..run import Run
from .other_nodes import OtherNodes
from .outcome import say
from .rendezvous_wait import Gathering

T = TypeVar("T")

TICK_S = 0.25
TICK_WHILE_RANKS_WAIT_S = 0.05
VIEW_S = 1.0
_LAST_WORDS_S = 5.0
_IMPATIENT_S = 3.0
TORCHRUNS_S = 30.0
"""torchrun kills ranks that have not ended this long after it sent them a signal."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_PR_SET_CHILD_SUBREAPER = 36


class Signals:
    """Collects the signals that arrive during a `with` block, for the loop to handle."""

    def __init__(self) -> None:
        self.stops: list[signal.Signals] = []
        self.others: list[signal.Signals] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for number in (*_STOPPING, *_PASSED_ON):
            self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]

    def _came(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        (self.stops if which in _STOPPING else self.others).append(which)


class Supervisor:
    """One launcher process, from its start to its end.

    Attributes:
        stopped_by: `doctor`, `interrupt`, `terminate`, or empty.

    Args:
        gathering: the wait for other nodes, if the launcher is torchrun; others: these nodes, once
            they are there.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        forward: Callable[[int, signal.Signals], None],
        view: Callable[[Run], None] | None = None,
        say: Callable[[str], None] = lambda line: None,
        gathering: Gathering | None = None,
        others: OtherNodes | None = None,
        all_ranks: bool = False,
    ) -> None:
        self.stopped_by = ""
        self._all_ranks = all_ranks
        self._others = others
        self._say = say
        self._gathering = gathering
        self._unheard = math.inf
        self._ended = False
        self._view = view
        self._viewed = 0.0
        self._interrupted = math.inf
        self._monitor = monitor
        self._forward = forward
        self._handled = 0
        self._child: subprocess.Popen[bytes] | None = None

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], *, new_session: bool
    ) -> int:
        """Start the launcher, wait for it, and return its status as a shell would.

        Raises:
            OSError: it cannot be started.
        """
        _adopt_orphans()
        with Signals() as signals:
            child = subprocess.Popen(
                list(command), env=dict(environment), start_new_session=new_session
            )
            self._child = child
            while not _wait(child, self._pause()):
                self._obey(signals)
                for number in signals.others:
                    self._send(number)
                signals.others.clear()
                self._tick()
                self._reap(child.pid)
            # The command may be a rank itself.
            self._ask(lambda: self._monitor.reaped(child.pid, child.returncode), None)
            while self._all_ranks and any(map(system.alive, self._ranks())):
                time.sleep(self._pause())
                self._obey(signals)
                self._tick()
            self._sweep(child.returncode)
            self._reap(0)
            self._tick()
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _ask(self, work: Callable[[], T], otherwise: T) -> T:
        """The result of `work`, a call of the monitor, or `otherwise` if it fails: an error there
        must not end the run or delay a signal."""
        try:
            return work()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._monitor.failed(error)
            return otherwise

    def _ranks(self) -> set[int]:
        """Pids of this node's ranks."""
        none: set[int] = set()
        return self._ask(self._monitor.rank_pids, none)

    def _pause(self) -> float:
        waiting = self._ask(lambda: self._monitor.ranks_wait, False)
        return TICK_WHILE_RANKS_WAIT_S if waiting else TICK_S

    def _tick(self) -> None:
        self._ask(self._look, None)

    def _look(self) -> None:
        reason = self._monitor.tick()
        lines = self._monitor.stall_detector.take_notices()
        if self._others:
            lines, reason = self._others.look(lines, reason)
        for line in lines:
            self._say(line)
        if self._gathering and not self.stopped_by:
            line, alone = self._gathering.look(self._monitor.begun)
            reason = reason or alone
            if line:
                self._say(line)
        if reason and not self.stopped_by:
            say(f"stopping the run: {reason}")
            self._stop("doctor", reason, signal.SIGTERM)
        now = time.monotonic()
        if now - self._interrupted > _IMPATIENT_S:
            self._interrupted = math.inf
            say(self._how_long())
        self._end_the_deaf(now)
        if self._view and self._monitor.run and now - self._viewed >= VIEW_S:
            self._viewed = now
            self._view(self._monitor.run)

    def _how_long(self) -> str:
        if not self._gathering:
            return "waiting for the command to end; press Ctrl-C again to kill it and its ranks"
        ranks = bool(self._monitor.rank_pids())
        whom, them = ("the ranks", "them") if ranks else ("torchrun", "it")
        limit = f"{TORCHRUNS_S:.0f} s"
        return f"waiting up to {limit} for {whom} to end; press Ctrl-C again to kill {them}"

    def _end_the_deaf(self, now: float) -> None:
        """End a torchrun that does not react to the stop signal and has no rank left: while it
        waits for other nodes in native code, Python's signal handlers do not run."""
        if not (self._gathering and self._child and self.stopped_by):
            return
        if self._monitor.rank_pids():
            self._unheard = now
        elif now - self._unheard > TORCHRUNS_S + _LAST_WORDS_S:
            self._child.kill()
        elif now - self._unheard > TORCHRUNS_S and not self._ended:
            self._ended = True
            self._child.terminate()

    def _obey(self, signals: Signals) -> None:
        """Handle stop signals: the first ends the run in an orderly way, the second kills it."""
        came, self._handled = signals.stops[self._handled :], len(signals.stops)
        for number in came:
            if not self.stopped_by:
                by = "interrupt" if number is signal.SIGINT else "terminate"
                self._interrupted = time.monotonic() if by == "interrupt" else math.inf
                self._stop(by, number.name, number)
            else:
                self._kill_all()

    def _stop(self, by: str, reason: str, number: signal.Signals) -> None:
        self.stopped_by = by
        self._unheard = time.monotonic()
        if by == "doctor" and not self._ask(self._monitor.rank_pids, {-1}):
            self._unheard -= TORCHRUNS_S  # who has no rank has nothing to save
        self._ask(lambda: self._monitor.stopped(by, reason), None)
        if (others := self._others) and by == "doctor":
            others.hand_on()
        elif others:
            word = "Ctrl-C" if by == "interrupt" else reason
            self._ask(lambda: others.tell_end(word), None)
        self._send(number)
        if self._all_ranks and by == "doctor":
            for pid in self._ranks():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _send(self, number: signal.Signals) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                self._forward(self._child.pid, number)

    def _kill_all(self) -> None:
        for process in _descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _sweep(self, status: int) -> None:
        """End ranks that are left where their launcher was killed or stopped.

        After a normal end, processes that still run are left alone (a TensorBoard that the script
        started, say).
        """
        if status >= 0 and not self.stopped_by:
            return
        if self._gathering and not self.stopped_by:
            reason = f"{signal.Signals(-status).name} to torchrun itself"
            self._ask(lambda: self._monitor.stopped("launcher", reason), None)
        self._tick()  # ranks may have come since the last look
        ranks = self._ranks()
        left = [p for p in _descendants() if p.pid in ranks]
        self._ask(lambda: self._monitor.swept({p.pid for p in left}), None)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline and any(system.alive(p.pid) for p in left):
            time.sleep(0.05)
        for process in left:
            if system.alive(process.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _reap(self, launcher: int) -> None:
        """Collect ended child processes, except the launcher, for which `Popen` waits."""
        with contextlib.suppress(ChildProcessError):
            while True:
                look = os.WEXITED | os.WNOHANG | os.WNOWAIT
                found = os.waitid(os.P_ALL, 0, look)
                if found is None or found.si_pid == launcher:
                    return
                pid, status = os.waitpid(found.si_pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status)
                self._ask(functools.partial(self._monitor.reaped, pid, code), None)


def to_launcher(pid: int, number: signal.Signals) -> None:
    """Signal torchrun, which forwards the signal to its ranks; they may have something to save."""
    os.kill(pid, number)


def to_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the whole process group of the command, as a terminal does."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)


def on_terminal(pid: int, number: signal.Signals) -> None:
    """Signal a command on our terminal, which has already sent it SIGINT and SIGQUIT."""
    if number not in (signal.SIGINT, signal.SIGQUIT):
        os.kill(pid, number)


def shares_terminal() -> bool:
    """Whether stdin is a terminal, so that the command may ask its user something (a password)."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _wait(child: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait up to `timeout` seconds for a child; whether it has ended."""
    try:
        fd = os.pidfd_open(child.pid)
    except (AttributeError, OSError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout)
        return child.poll() is not None
    try:
        select.select([fd], [], [], timeout)
    finally:
        os.close(fd)
    return child.poll() is not None


def _adopt_orphans() -> None:
    """Become the parent of ranks whose launcher dies, so that they can be found and ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> list[psutil.Process]:
    try:
        return list(psutil.Process().children(recursive=True))
    except psutil.Error:
        return []
