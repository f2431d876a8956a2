"""`ddpdoctor run` and `ddpdoctor exec`, from the folder to the exit status."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from .._version import __version__
from ..events import ExaminedInside, Stopped
from ..monitor.monitor import Monitor
from ..report import registry
from ..report.findings import Report
from ..run import Recording
from ..storage.run_folder import EventWriter, FolderError, RunFolder, RunInfo, plain_name
from . import live, outcome, supervisor, torchrun
from .agent_orders import VARIABLE, Orders
from .environment import LaunchError, environment
from .job_step import Task, this_task
from .other_nodes import OtherNodes
from .rendezvous_wait import Gathering

if TYPE_CHECKING:
    from ..config import Options

UNUSABLE = 2
_NO_SUCH_COMMAND = 127
_NOT_EXECUTABLE = 126


@dataclass
class Session:
    """One run on one node, ready to start."""

    folder: RunFolder
    info: RunInfo
    monitor: Monitor
    options: Options

    @functools.cached_property
    def others(self) -> OtherNodes:
        """The other nodes of the run."""
        return OtherNodes(self.folder, self.monitor, self.preliminary)

    def preliminary(self, status: int, stopped_by: str) -> Report:
        """The report on all nodes, to be handed on to the others.

        Args:
            status: of torchrun, which has ended its ranks.
            stopped_by: who is about to stop the run (see `Supervisor`), empty for nobody.
        """
        run = Recording(self.folder).refresh(self.folder.attempts()[-1])
        stop = next((s for n in run.nodes.values() for s in n.of(Stopped)), None)
        info = outcome.ended(self.info, run, status, stop.by if stop else stopped_by)
        return outcome.examine(self.folder, self.options, info)

    def write_info(self) -> None:
        """Write `run.json`. Nodes that share a folder have one, that of the first node."""
        there = self.folder.read_info()
        mine = self.info.node_rank
        if mine == 0 or there is None or there.node_rank == mine:
            self.folder.write_info(self.info)

    def finish(self, status: int, stopped_by: str) -> int:
        """Close the records, diagnose and report; returns the exit status of the command."""
        report = None
        try:
            self.monitor.finish()
        except Exception as error:
            outcome.say(f"the monitor failed at the end ({error!r})")
        try:
            run = Recording(self.folder).refresh(self.folder.attempts()[-1])
            self.info = outcome.ended(self.info, run, status, stopped_by)
            unsaved: RunInfo | None = self.info
            with outcome.reported("run.json"):
                self.write_info()
                unsaved = None
            self.others.gather(run)
            report = self.others.verdict() or outcome.examine(self.folder, self.options, unsaved)
            outcome.publish(self.folder, report, self.options, run)
            if short := self.others.shortfall():
                outcome.say(short)
            self.others.tell(report)
        except Exception as error:  # training's status must come through whatever we got wrong
            outcome.say(f"no report ({error!r}); the records are in {self.folder.path}")
            if os.environ.get("DDPDOCTOR_DEBUG"):
                traceback.print_exc()
        return outcome.exit_status(status, stopped_by, report, self.options)


def run(options: Options, torchrun_args: Sequence[str], *, gathers_s: float | None = None) -> int:
    """Launch with torchrun, examine every rank, report; returns the exit status.

    Args:
        torchrun_args: torchrun's options, the script and its arguments; no options of the doctor.
        gathers_s: how long the nodes may take to arrive; None for as long as torchrun waits.
    """
    args = torchrun.with_defaults(torchrun_args, os.environ)
    parsed = torchrun.parse(args)

    def start(session: Session, added: dict[str, str]) -> tuple[int, str]:
        orders = Orders(
            environment=added,
            node_file=str(session.folder.node_path(session.monitor.node_rank).resolve()),
            several=session.info.nodes > 1,
            supervisor=os.getpid(),
            safe_path=os.environ.get("PYTHONSAFEPATH"),
        )
        agents = {
            **os.environ,
            VARIABLE: orders.to_text(),
            # `-m` would put the current folder first: a random.py there must not break torchrun.
            "PYTHONSAFEPATH": "1",
        }
        command = [sys.executable, "-m", "ddpdoctor.launch.agent", "--", *args]
        nodes = Gathering(parsed, os.environ, options.hang_after, gathers_s)
        forward = supervisor.to_launcher
        return _watched(session, command, agents, forward, new_session=True, gathering=nodes)

    words = [parsed.script or "", *parsed.script_args]
    stem = _stem(words) if "no-python" in parsed.options else parsed.stem
    return _examined(options, ["torchrun", *args], "run", stem, start, parsed)


def exec_command(options: Options, command: Sequence[str]) -> int:
    """Run a command that starts its ranks itself, examine them, report; returns the status."""

    def start(session: Session, added: dict[str, str]) -> tuple[int, str]:
        terminal = supervisor.shares_terminal()
        forward = supervisor.on_terminal if terminal else supervisor.to_group
        environ = {**os.environ, **added}
        alone = task is None
        return _watched(
            session, command, environ, forward, new_session=not terminal, all_ranks=not alone
        )

    task = this_task(os.environ)
    return _examined(options, command, "exec", _stem(command), start, torchrun.TorchrunArgs(), task)


def _examined(
    options: Options,
    command: Sequence[str],
    launcher: str,
    stem: str,
    start: Callable[[Session, dict[str, str]], tuple[int, str]],
    parsed: torchrun.TorchrunArgs,
    task: Task | None = None,
) -> int:
    try:
        registry.select(options.select, options.ignore)
        if task is not None:
            folder = task.folder(options.out, stem)
            if not task.is_first(folder):
                added = environment(folder, options, meets=True)
                os.execvpe(command[0], list(command), {**os.environ, **added})
        else:
            folder = _open_folder(options.out, stem, torchrun.shared_id(parsed, os.environ))
        session = _prepare(options, command, launcher, folder, parsed, task)
        added = environment(session.folder, options, meets=launcher == "exec")
    except (FolderError, LaunchError, registry.SelectionError, registry.RegistryError) as error:
        outcome.say(str(error))
        return UNUSABLE
    if not options.quiet:
        outcome.say(f"examining this run, records in {session.folder.path}")
    _tell_outer(session.folder)
    status, stopped_by = start(session, added)
    return session.finish(status, stopped_by)


def _tell_outer(folder: RunFolder) -> None:
    """Tell an outer ddpdoctor, which sees no rank of this run, where its records are."""
    outer = os.environ.get("DDPDOCTOR_DIR")
    for _, path in RunFolder(outer).node_files()[:1] if outer else ():
        with contextlib.suppress(OSError):
            writer = EventWriter(path, shared=True)
            writer.write(ExaminedInside(at=time.monotonic(), folder=str(folder.path.resolve())))
            writer.close()


def _watched(
    session: Session,
    command: Sequence[str],
    environ: Mapping[str, str],
    forward: Callable[[int, signal.Signals], None],
    *,
    new_session: bool,
    gathering: Gathering | None = None,
    all_ranks: bool = False,
) -> tuple[int, str]:
    """Run the launcher to its end; returns its status and who stopped it (see `Supervisor`)."""
    leads = session.info.node_rank == 0
    with live.shown(session.folder, session.options, outcome.say, leads=leads) as view:
        watch = supervisor.Supervisor(
            session.monitor,
            forward=forward,
            view=view,
            say=outcome.say,
            gathering=gathering,
            all_ranks=all_ranks,
            others=session.others if session.info.nodes > 1 or gathering is None else None,
        )
        try:
            status = watch.run(command, environ, new_session=new_session)
        except OSError as error:
            outcome.say(f"cannot start {command[0]}: {error.strerror}")
            missing = isinstance(error, FileNotFoundError)
            status = _NO_SUCH_COMMAND if missing else _NOT_EXECUTABLE
    return status, watch.stopped_by


def _prepare(
    options: Options,
    command: Sequence[str],
    launcher: str,
    folder: RunFolder,
    parsed: torchrun.TorchrunArgs,
    task: Task | None,
) -> Session:
    shared = torchrun.shared_id(parsed, os.environ) if task is None else task.step
    number = torchrun.node_rank(parsed, os.environ) if task is None else task.node
    monitor = Monitor(folder, number, options, launcher=launcher)
    try:
        monitor.start()
    except OSError as error:
        raise FolderError(f"cannot write to {folder.path} ({error.strerror})") from error
    info = RunInfo(
        schema_version=1,
        id=shared or uuid.uuid4().hex,
        command=list(command),
        started_at=outcome.now(),
        tool_version=__version__,
        nodes=torchrun.nodes(parsed, os.environ),
        node_rank=monitor.node_rank,
        node=platform.node(),
        python=platform.python_version(),
        platform=platform.platform(),
        launcher=launcher,
        budget_percent=options.budget,
    )
    session = Session(folder, info, monitor, options)
    with contextlib.suppress(OSError):
        session.write_info()
    return session


def _open_folder(out: Path | None, stem: str, shared: str | None) -> RunFolder:
    """A new run folder, or the one that another node of the same run has created."""
    if out is not None:
        there = RunFolder(out).read_info()
        if there and shared and there.id == shared and there.ended_at is None:
            return RunFolder(out)
        return RunFolder.create(out)
    base = Path("ddpdoctor-runs")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plain_name(stem)}"
    for number in range(1, 1000):
        path = base / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return RunFolder.create(path)
    raise FolderError(f"too many runs called {name} in {base}; give a folder with --out")


def _stem(command: Sequence[str]) -> str:
    """A name for a command: that of its script, else of its program."""
    scripts = [PurePath(word).stem for word in command if word.endswith(".py")]
    return scripts[0] if scripts else PurePath(command[0]).stem
