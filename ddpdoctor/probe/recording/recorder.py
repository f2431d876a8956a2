"""The recorder of this process, if it is a rank: writes events and measures what the doctor costs.

All code of the probe that torch or the program calls goes through `run_hook`, `guarded` or
`shielded`, so that no failure of the doctor reaches the user.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...events import Event, NotObserved, ProbeCost, ProbeTrouble
from ...storage.run_folder import EventWriter
from . import devices, startup_cost
from .code_locations import Sites
from .limits import COST_EVERY_S, COST_FIRST_S, TROUBLE_LIMIT
from .torch_compat import interposed, pause_compiler, resume_compiler, without_modes

T = TypeVar("T")


class Recorder:
    """Writes the events of one rank; everything that hooks share.

    Attributes:
        own_ns: nanoseconds spent in the doctor's own code since `started`.
        start_ns: nanoseconds the doctor took to start, most of it before `started`; not part of
            the budget.
        step: optimizer steps taken so far, by any optimizer.
        moves: backwards begun, plus optimizer steps.
        options: what the launcher asked for (`budget`, ...).
        every: the option of this name: sample one step in so many; 0 if the doctor chooses.
        off: the parts that failed too often and are switched off.
        lock: taken to write an event, and to change records that wait to be merged into one.
        before_events: called before an event is written, to write those that still wait.
        after_events: called after an event, to reopen files whose descriptors the program closed.
        behind: called before anything else is done in this process, while steps are light, to
            account for those so far (see `LightRun`).
        began: when the process started, or as near to it as is known.
        call_log: the `CallLog`, None until the first call; `call_log_failed`: its file could not be
            made.
    """

    def __init__(
        self, writer: EventWriter, directory: Path, stem: str, options: dict[str, Any]
    ) -> None:
        self.writer = writer
        self.directory = directory
        self.stem = stem
        self.options = options
        self.budget_percent = float(options.get("budget", 1.0))
        every = str(options.get("every"))
        self.every = int(every) if every.isdigit() else 0
        self.sites = Sites(self.emit)
        self.started = time.monotonic()
        self.pid = os.getpid()
        self.own_ns = 0
        self.start_ns = startup_cost.take_ns()
        self.step = 0
        self.moves = 0
        self.off: set[str] = set()
        self.before_events: Callable[[Recorder], None] | None = None
        self.after_events: Callable[[], None] | None = None
        self.behind: Callable[[], None] | None = None
        self.call_log: Any = None
        self.call_log_failed = False
        self._troubles: dict[str, int] = {}
        self._not_observed: set[tuple[str, str]] = set()
        self.began = startup_cost.before(self.started, self.start_ns)
        self._cost_emitted = self.started
        self._cost_every = COST_FIRST_S
        # Re-entrant: a signal handler of the user's may open a file while an event is written.
        self.lock = threading.RLock()

    def emit(self, event: Event, *, vital: bool = False) -> None:
        """Append an event; `vital` ones are written even when the record is full. Thread-safe."""
        self.catch_up()
        with self.lock:
            if self.before_events is not None:
                self.before_events(self)
            self.writer.write(event, vital=vital)
            self.emit_cost()
            if self.after_events is not None:
                self.after_events()

    def catch_up(self) -> None:
        """Account for the light steps so far, before what they changed is read."""
        if self.behind is not None:
            self.behind()

    def site(self) -> int:
        """The number of the line of the user's code that is executing."""
        return self.sites.here()

    def trouble(self, part: str, error: BaseException, lost: str = "") -> None:
        """Count a failure of a hook, record it once, and switch the hook off if it keeps failing.

        Args:
            lost: what is not observed because of it, for the report.
        """
        count = self._troubles[part] = self._troubles.get(part, 0) + 1
        text = repr(error)[:400]
        if devices.failed(error):
            text += "; a kernel that the program launched before may have failed"
        if count >= TROUBLE_LIMIT:
            self.off.add(part)
        if count not in (1, TROUBLE_LIMIT):
            return
        with contextlib.suppress(Exception):  # the last resort: nobody is left to catch this
            self.emit(
                ProbeTrouble(
                    at=time.monotonic(),
                    part=part,
                    error=text,
                    lost=lost,
                    disabled=count >= TROUBLE_LIMIT,
                ),
                vital=True,
            )

    def disabled(self, part: str) -> bool:
        return part in self.off

    def not_observed(self, check: str, reason: str, *, partly: bool = False) -> None:
        """Record, once, that a check lacks its facts, or a part of them, and why."""
        if (check, reason) not in self._not_observed:
            self._not_observed.add((check, reason))
            self.emit(NotObserved(at=time.monotonic(), check=check, reason=reason, partly=partly))

    def affordable(self) -> bool:
        """Whether the doctor is within its budget and may do something costly now."""
        elapsed_ns = (time.monotonic() - self.started) * 1e9
        return self.own_ns < elapsed_ns * self.budget_percent / 100

    def emit_cost(self, *, anyway: bool = False) -> None:
        """Record the doctor's own time, if the last `ProbeCost` is old enough or `anyway`."""
        now = time.monotonic()
        if anyway or now - self._cost_emitted > self._cost_every:
            self._cost_emitted = now
            self._cost_every = min(2 * self._cost_every, COST_EVERY_S)
            self.start_ns += startup_cost.take_ns()
            self.emit(
                ProbeCost(
                    at=now,
                    own_s=(self.own_ns + self.start_ns) / 1e9,
                    wall_s=now - self.began,
                    start_s=self.start_ns / 1e9,
                    events=self.writer.count,
                    dropped=self.writer.dropped,
                    steps=self.step,
                    device_s=devices.Work.ns / 1e9,
                ),
                vital=True,
            )


class _Current:
    recorder: Recorder | None = None


current = _Current()
"""Read directly by what runs in light steps; others ask `current_recorder`."""


def current_recorder() -> Recorder | None:
    """The recorder of this process; None if it is not a rank. Light steps are accounted for."""
    recorder = current.recorder
    if recorder is not None and recorder.behind is not None:
        began = time.perf_counter_ns()
        recorder.catch_up()
        recorder.own_ns += time.perf_counter_ns() - began
    return recorder


def set_recorder(new: Recorder | None) -> None:
    current.recorder = new


def forget_after_fork() -> None:
    """Stop recording in a forked child: it is not the rank, and must not write to its file."""
    current.recorder = None


os.register_at_fork(after_in_child=forget_after_fork)


class Failure:
    """Returned by `run_hook` in place of a result if the hook raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error.with_traceback(None)  # its frames would keep the user's tensors alive


def run_hook(
    recorder: Recorder, part: str, lost: str | None, hook: Callable[..., Any], *args: Any
) -> Any:
    """Call `hook(recorder, *args)`: no exception gets out, its time counts as the doctor's, and
    torch.compile and the user's modes do not see it.

    Returns:
        What the hook returns. If it raised: None, and the failure is recorded; or a `Failure`, and
        nothing is recorded, if `lost` is None.
    """
    if part in recorder.off:
        return None
    began = time.perf_counter_ns()
    paused = None
    try:
        if interposed.compiler() is not None:
            paused = pause_compiler()
        if recorder.behind is not None:
            recorder.behind()
        if interposed.functions() or interposed.dispatches():
            with without_modes():
                return hook(recorder, *args)
        return hook(recorder, *args)
    except Exception as error:
        if lost is None:
            return Failure(error)
        recorder.trouble(part, error, lost)
        return None
    finally:
        if paused is not None:
            resume_compiler(paused)
        recorder.own_ns += time.perf_counter_ns() - began


def guarded(part: str, work: Callable[[Recorder], T], lost: str = "") -> T | None:
    """Call `work(recorder)` as `run_hook` does; None if it failed or this process is no rank."""
    recorder = current.recorder
    return None if recorder is None else run_hook(recorder, part, lost, work)


def shielded(part: str, callback: Callable[..., None], lost: str = "") -> Callable[..., None]:
    """Wrap a callback for torch to call: its failures are recorded and never reach the user.

    Its time is not measured: these run in the autograd engine, for every parameter.
    """

    def call(*args: Any) -> None:
        try:
            if interposed.functions() or interposed.dispatches():
                with without_modes():
                    callback(*args)
            else:
                callback(*args)
        except Exception as error:
            if (recorder := current.recorder) is not None:
                recorder.trouble(part, error, lost)

    return call


def write_probe_error(error: BaseException) -> None:
    """Write an error to a file in the run folder, for failures that no recorder can record."""
    try:
        path = os.path.join(os.environ["DDPDOCTOR_DIR"], f"probe-errors-{os.getpid()}.txt")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            traceback.print_exception(error, file=file)
    except (OSError, KeyError):  # there is no run folder to write to
        pass
