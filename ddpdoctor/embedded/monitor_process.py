"""The monitor of a run without `ddpdoctor run`: `python -m ddpdoctor.embedded`.

The first rank of a node starts it. It lives until the ranks of that node have ended, and then
writes and prints the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from ..config import Options, resolve
from ..events import RankExiting
from ..launch import live, outcome
from ..launch.other_nodes import OtherNodes
from ..monitor import system
from ..monitor.monitor import Monitor
from ..report.suppression import Ignored
from ..run import Recording, Run
from ..storage.run_folder import RunFolder, RunInfo
from .shared_folder import reported

TICK_S = 0.25
TICK_WHILE_RANKS_WAIT_S = 0.02
FIRST_RANK_S = 60.0
"""How long it waits for the first record of the first rank."""
LATE_RANK_S = 5.0
"""How long it waits for further ranks of the node after all known ones have ended."""
ANNOUNCED_S = 3.0
"""How long ranks that have said that they leave still hand over the records of other nodes."""
RESTART_S = 60.0
LAST_WORDS_S = 5.0

SHELL = '"$@" &'
"""Starts the command in the background, so that it is not a child of the rank, which might wait for
its children."""


class Orders(msgspec.Struct, frozen=True):
    """What the rank that starts the watcher passes to it.

    Attributes:
        options: the options from the program, the environment and the configuration file.
        launcher: pid of the ranks' parent.
        local_size: ranks that this node will have, 0 where unknown.
    """

    folder: str
    options: dict[str, str | int | float | bool | list[str]]
    node_rank: int
    launcher: int
    local_size: int
    owns_info: bool
    more_attempts: bool
    ignored: tuple[Ignored, ...] = ()


def start(orders: Orders) -> None:
    """Start a watcher that is not a child of this process.

    Raises:
        OSError: there is no shell or no Python to run.
    """
    home = str(Path(__file__).resolve().parents[2])
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DDPDOCTOR_DIR", "LD_PRELOAD")
    }
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{before}{os.pathsep}{home}" if before else home
    environment["PYTHONSAFEPATH"] = "1"
    text = msgspec.json.encode(orders).decode()
    if not sys.executable:
        raise FileNotFoundError("no Python to run the watcher with")
    command = [sys.executable, "-m", "ddpdoctor.embedded", text]
    subprocess.run(
        ["/bin/sh", "-c", SHELL, "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        check=True,
        timeout=10,
    )


class Watcher:
    """One node's monitor, from the first rank to the report."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.folder = RunFolder(orders.folder)
        options: Options = resolve(
            {**orders.options, "out": orders.folder}, environ={}, cwd=Path("/")
        )
        self.options = dataclasses.replace(options, ignored=orders.ignored)
        self.monitor = Monitor(self.folder, orders.node_rank, self.options, launcher="exec")
        self.others = OtherNodes(
            self.folder,
            self.monitor,
            lambda status, by: outcome.examine(self.folder, self.options, None),
        )
        self.stopped_by = ""
        self._began = time.monotonic()
        self._all_done_since: float | None = None

    def run(self) -> None:
        """Watch until the ranks are done, then report."""
        self.monitor.start()
        signal.signal(signal.SIGTERM, self._terminated)
        leads = self.orders.node_rank == 0
        with live.shown(self.folder, self.options, outcome.say, leads=leads, table=False) as show:
            while not self._over():
                self._look(show)
                if self.stopped_by == "terminate":
                    break
                time.sleep(TICK_WHILE_RANKS_WAIT_S if self.monitor.ranks_wait else TICK_S)
        self.monitor.finish()
        self._report()

    def _look(self, show: live.Show | None) -> None:
        reason = self.monitor.tick()
        lines, reason = self.others.look(self.monitor.stall_detector.take_notices(), reason)
        for line in lines:
            outcome.say(line)
        if reason and not self.stopped_by:
            outcome.say(f"stopping the run: {reason}")
            self._stop("doctor", reason)
        if show and self.monitor.run:
            with contextlib.suppress(Exception):  # the view is no reason to watch no more
                show(self.monitor.run)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or "terminate"

    def _over(self) -> bool:
        run, now = self.monitor.run, time.monotonic()
        if run is None or not self.monitor.watched:
            starter_gone = not psutil.pid_exists(self.orders.launcher)
            return now - self._began > (LATE_RANK_S if starter_gone else FIRST_RANK_S)
        if not self._all_done(run):
            self._all_done_since = None
            return False
        if self._all_done_since is None:
            self._all_done_since = now
        waited = now - self._all_done_since
        if waited < ANNOUNCED_S and self.others.unannounced():
            return False
        launcher_gone = not system.alive(self.orders.launcher)
        here = [w for w in self.monitor.watched.values() if w.attempt == run.attempt]
        if len(here) < self.orders.local_size and not launcher_gone and waited < LATE_RANK_S:
            return False
        failed = any(r.state != "finished" for r in run.ranks.values())
        restarting = self.orders.more_attempts and failed and not launcher_gone
        return not restarting or waited > RESTART_S

    def _all_done(self, run: Run) -> bool:
        """Whether every rank of this node is gone or has said that it leaves."""
        said = {
            one.started.pid for one in run.processes() if one.started and one.latest(RankExiting)
        }
        return all(w.gone is not None or w.pid in said for w in self.monitor.watched.values())

    def _stop(self, by: str, reason: str) -> None:
        self.stopped_by = by
        self.monitor.stopped(by, reason)
        self.others.hand_on()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.monitor.rank_pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + LAST_WORDS_S
            while self.monitor.rank_pids() and time.monotonic() < deadline:
                time.sleep(TICK_S)
                self.monitor.tick()

    def _report(self) -> None:
        run = Recording(self.folder).refresh(self.folder.attempts()[-1])
        codes = [r.exit_code or 0 for r in run.ranks.values()]
        info = self.folder.read_info()
        unsaved = None
        if info is not None and self.orders.owns_info:
            unsaved = _ended(info, run, max(codes, default=0), self.stopped_by)
            with outcome.reported("run.json"):
                self.folder.write_info(unsaved)
                unsaved = None
        self.others.gather(run)
        report = self.others.verdict() or outcome.examine(self.folder, self.options, unsaved)
        outcome.publish(self.folder, report, self.options, run)
        self.others.tell(report)
        if short := self.others.shortfall():
            outcome.say(short)


def _ended(info: RunInfo, run: Run, status: int, stopped_by: str) -> RunInfo:
    """How it ended; the launcher's status is seen by nobody, and only the ranks' are known."""
    info = outcome.ended(info, run, status, stopped_by)
    unknown = status == 0 and info.outcome != "completed"
    return msgspec.structs.replace(info, exit_code=None) if unknown else info


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    try:
        Watcher(orders).run()
    except Exception as error:
        outcome.say(f"the monitor failed ({error!r}); type ddpdoctor report {orders.folder}")
    finally:
        with contextlib.suppress(OSError):
            reported(RunFolder(orders.folder))
