"""What the decorator does in a rank: it finds the run folder and starts the probe and the monitor.

An error here is printed once and ends the examination, never the run.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..config import Options, resolve
from ..monitor.stop_agreement import LEFT, Counter, Place, Request, Verdict, is_meeting_point
from ..report.findings import Report
from ..storage.run_folder import RunFolder
from . import monitor_process, shared_folder

MEET_S, FIRST_MEET_S = 5.0, 15.0
"""How long a rank waits for the monitor, the first time while it may still start. After a wait in
vain the rank does not wait again."""
REPORT_S = 15.0
"""How long the end of a block waits for the other ranks and the report."""
PROMPT_S = 4.0
"""How long the end of the process waits for the report to be printed."""
RANKS_COME_S = 2.0
"""How long after the first rank of a node has begun its record others may, where they already have
a process group."""

POLL_S = 0.005


class RankSession:
    """The examination of this process, if it is a rank; one per process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.folder: Path | None = None
        self._launch: shared_folder.Launch | None = None
        self._asked: dict[str, Any] = {}
        self._prepared = self._ours = self._failed = False
        self._blocks = 0
        self._place: Place | None = None
        self._counter: Counter | None = None
        self._meets = True

    def prepare(self, asked: dict[str, Any]) -> None:
        """Install the probe; recording starts when this process becomes a rank."""
        if self._prepared or self._failed:
            return
        self._prepared = True
        self._asked = asked
        try:
            from .. import probe

            if _examined_from_outside():
                if "torch" in sys.modules:
                    probe.torch_found()  # where the command did not see it being imported
                return
            self._ours = True
            import torch.distributed  # noqa: F401

            probe.watch_here(self._open)
        except Exception as error:
            self._give_up(error)

    def begin(self, asked: dict[str, Any], *, block: bool = False) -> None:
        """Start: the decorated function is called, or a block entered, for the first time."""
        self.prepare(asked)
        if self._failed:
            return
        try:
            from .. import probe

            if self._ours and probe.current_recorder() is None:
                rank, world_size = _who(shared_folder.this_launch())
                if rank < 0 and block:  # `init_process_group` may still be to come
                    probe.become_rank_by_training()
                    return
                probe.become_rank(max(rank, 0), max(world_size, 1))
            active = probe.current_recorder()
            if active is not None and (every := resolve(asked).every):
                active.options["every"] = every
        except Exception as error:
            self._give_up(error)

    def _open(self, rank: int, world_size: int) -> tuple[Path, dict[str, Any]] | None:
        """The folder to record in and the probe's options, for the probe; starts the monitor. None
        where that fails."""
        if self._failed:
            return None
        try:
            return self._opened(rank, world_size)
        except Exception as error:
            self._give_up(error)
            return None

    def _opened(self, rank: int, world_size: int) -> tuple[Path, dict[str, Any]]:
        options = resolve(self._asked)
        known = shared_folder.this_launch()
        known_rank, known_size = _who(known)
        launch = dataclasses.replace(
            known,
            key=f"{known.key}-{self._blocks}" if self._blocks else known.key,
            rank=rank if rank >= 0 else known_rank,
            world_size=world_size if world_size >= 0 else known_size,
        )
        self._launch = launch
        folder = shared_folder.open_folder(options.out, launch, stem=shared_folder.stem_of(launch))
        self.folder = folder.path
        try:
            self._watch(folder, options, launch)
        except Exception as error:
            self._say(f"no monitor ({error!r}); for the report type ddpdoctor report {folder.path}")
        chosen = {
            "budget": options.budget,
            "every": options.every,
            "select": options.select,
            "ignore": options.ignore,
            "hang_after": options.hang_after,
            "ranks_come_s": RANKS_COME_S,
        }
        return folder.path, chosen

    def _watch(self, folder: RunFolder, options: Options, launch: shared_folder.Launch) -> None:
        """Start the monitor of this node, unless another rank has done so."""
        if not shared_folder.is_first_here(folder):
            return
        info = folder.read_info()
        monitor_process.start(
            monitor_process.Orders(
                folder=str(folder.path),
                options=_plain(options),
                node_rank=launch.node_rank,
                launcher=os.getppid(),
                local_size=launch.local_size,
                owns_info=info is not None and info.id == launch.key,
                more_attempts=launch.more_attempts,
                ignored=options.ignored,
            )
        )
        if not options.quiet:
            self._say(f"examining this run, records in {_shown(folder.path)}")
        atexit.register(self._before_exit)

    def verdict(self, raise_on: str, asked: dict[str, Any], call: int) -> Verdict | None:
        """The verdict by which this rank has to stop after call number `call`, None to continue."""
        if self._failed:
            return None
        try:
            return self._verdict(raise_on, asked, call)
        except Exception as error:
            self._give_up(error)
            return None

    def _verdict(self, raise_on: str, asked: dict[str, Any], call: int) -> Verdict | None:
        if self._counter is None and not self._ask(raise_on, asked):
            return None
        assert self._place is not None and self._counter is not None
        self._counter.set(call)
        if is_meeting_point(call) and self._meets:
            self._meets = self._meet(call)
        verdict = self._place.read()
        return verdict if verdict is not None and verdict.at_call <= call else None

    def raising(self, fault: Exception) -> None:
        """Record that our exception is raised: what the program does next follows from it."""
        with contextlib.suppress(Exception):
            from .. import probe

            probe.note_exception(fault, None, caught=True)

    def left(self) -> None:
        """Record that a call raised, so that the other ranks do not wait for this one."""
        if self._counter is not None:
            with contextlib.suppress(OSError):
                self._counter.set(LEFT)

    def _ask(self, raise_on: str, asked: dict[str, Any]) -> bool:
        from .. import probe

        active = probe.current_recorder()
        if active is None:
            return False
        options = resolve(asked)
        self._place = Place(active.directory)
        self._place.ask(Request(raise_on, options.select, options.ignore))
        self._counter = self._place.counter(_rank_of(active.stem))
        self.folder = self.folder or active.directory
        return True

    def _meet(self, call: int) -> bool:
        """Wait until the monitor has diagnosed all up to this call; False where it does not."""
        assert self._place is not None
        looked = self._place.looked_at()
        deadline = time.monotonic() + (MEET_S if looked else FIRST_MEET_S)
        while self._place.looked_at() < call:
            if time.monotonic() > deadline:
                return False
            if (verdict := self._place.read()) is not None and verdict.at_call <= call:
                return True
            time.sleep(POLL_S)
        return True

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """End of the block: stop recording and wait for the report, unless the block raised."""
        if not self._ours or self._failed:
            return
        try:
            from .. import probe

            self._blocks += 1
            self._prepared = False
            self._place = self._counter = None
            if probe.current_recorder() is None and not resolve(self._asked).quiet:
                self._say(
                    "nothing to examine: in this process the block creates no process group and "
                    "takes no optimizer step"
                )
            probe.leave(error, trace)
            if error is None:  # else the others may be waiting for this process to end
                self._wait_for_report(REPORT_S)
        except Exception as problem:
            self._give_up(problem)

    def report(self) -> Report | None:
        """The report that the monitor has written, None where there is none (yet)."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            content = RunFolder(self.folder).findings_path.read_bytes()
            return msgspec.json.decode(content, type=Report)
        return None

    def _before_exit(self) -> None:
        from .. import probe

        if not probe.failed():  # else the launcher is about to end this process anyway
            self._wait_for_report()

    def _wait_for_report(self, limit_s: float = PROMPT_S) -> None:
        """Wait until the report is printed, so that the shell's prompt comes after it."""
        if os.getpid() != self.pid or self.folder is None:
            return
        deadline = time.monotonic() + limit_s
        folder = RunFolder(self.folder)
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and not shared_folder.is_reported(folder):
                time.sleep(POLL_S)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._say(f"this rank is not examined: {error}" if str(error) else repr(error))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"ddpdoctor: {text}", file=sys.stderr, flush=True)


_current: RankSession | None = None


def session() -> RankSession:
    """The session of this process; a forked child gets its own."""
    global _current
    if _current is None or _current.pid != os.getpid():
        _current = RankSession()
    return _current


def _examined_from_outside() -> bool:
    """Whether this process runs under `ddpdoctor run` or `exec`."""
    return bool(os.environ.get("DDPDOCTOR_DIR"))


def _who(launch: shared_folder.Launch) -> tuple[int, int]:
    """Rank and world size, -1 where they are not known."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if multiprocessing.parent_process() is not None and "RANK" not in os.environ:
        return -1, -1  # what it inherited of a scheduler's variables is its parent's
    return launch.rank, launch.world_size


def _rank_of(stem: str) -> int:
    return int(stem.partition(".")[0].rpartition("-")[2])


def _plain(options: Options) -> dict[str, Any]:
    """The options in types that JSON supports."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        if field.name == "ignored":  # goes as it is
            continue
        value = getattr(options, field.name)
        if isinstance(value, Path):
            found[field.name] = str(value.resolve())
        elif isinstance(value, tuple):
            found[field.name] = list(value)
        elif value is not None:
            found[field.name] = value
    return found


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
