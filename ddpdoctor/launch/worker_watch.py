"""Records the start and end of torchrun's worker processes, from inside torchrun.

It uses private parts of `torch.distributed.elastic.multiprocessing.api` (unchanged from torch 2.4
to 2.15): `PContext.start/_poll/_close`, `SubprocessContext.subprocess_handlers`,
`MultiprocessContext._pc`. Without them, ends are known only from `ChildFailedError`: which ranks
failed, but not when, and nothing about ranks that ended well.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..events import Event, ProcessEnded, ProcessStarted, Stopped
from ..storage.run_folder import EventWriter
from .end_times import EndClock

_DEFERRED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Observer:
    """Writes `ProcessStarted` and `ProcessEnded`, each as soon as it is known, and `Stopped` where
    torchrun itself gets a signal.

    Args:
        supervisor: the pid of the process that started torchrun.
    """

    def __init__(self, node_file: Path, supervisor: int) -> None:
        self._supervisor = supervisor
        self._writer: EventWriter | None
        try:
            self._writer = EventWriter(node_file, shared=True)
        except OSError:
            self._writer = None
        self._known: set[int] = set()  # pids whose end is written
        self._clock = EndClock()

    def install(self) -> None:
        """Wrap torchrun's process contexts."""
        from torch.distributed.elastic.multiprocessing import api

        for name in ("SubprocessContext", "MultiprocessContext"):
            context = getattr(api, name, None)
            if context is not None:
                self._wrap(context, "start", after=self._started)
                self._wrap(context, "_poll", before=self._ended)
                self._wrap_close(context)

    def failed(self, error: Any) -> None:
        """Record the ends of failed ranks that were not seen, from torchrun's exception."""
        with _Quiet():
            for rank, failure in error.failures.items():
                if failure.pid not in self._known:
                    self._end(rank, failure.pid, failure.exitcode, 0, False)

    def _wrap(
        self,
        context: type,
        method: str,
        before: Callable[[Any], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        original = getattr(context, method, None)
        if original is None:
            return

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            with _Quiet():
                if before:
                    before(this)
            result = original(this, *args, **kwargs)
            with _Quiet():
                if after:
                    after(this)
            return result

        setattr(context, method, wrapped)

    def _wrap_close(self, context: type) -> None:
        original = getattr(context, "_close", None)
        if original is None:
            return

        @functools.wraps(original)
        def close(this: Any, *args: Any, **kwargs: Any) -> Any:
            with _Quiet():
                self._ended(this)  # who was gone before torchrun ended the others
                self._stopped(sys.exc_info()[1])
            with _Patience():
                try:
                    return original(this, *args, **kwargs)
                finally:
                    with _Quiet():
                        self._ended(this, by_launcher=True)

        context._close = close  # type: ignore[attr-defined]

    def _stopped(self, error: BaseException | None) -> None:
        if error is None or not _is_torchruns(type(error)):
            return
        name = signal.Signals(getattr(error, "sigval", signal.SIGTERM)).name
        alone = os.getppid() != self._supervisor  # see `die_with`
        reason = "the end of ddpdoctor itself" if alone else f"{name} to torchrun itself"
        self._write(Stopped(at=time.monotonic(), by="launcher", reason=reason))

    def _started(self, context: Any) -> None:
        self._clock.watch(list(context.pids().values()))
        for local_rank, pid in context.pids().items():
            rank, attempt = _place(context, local_rank)
            world = int(context.envs[local_rank].get("WORLD_SIZE", 0))
            self._write(
                ProcessStarted(
                    at=time.monotonic(),
                    rank=rank,
                    local_rank=local_rank,
                    pid=pid,
                    wall=time.time(),
                    world_size=world,
                    attempt=attempt,
                )
            )

    def _ended(self, context: Any, by_launcher: bool = False) -> None:
        for local_rank, pid, code in _codes(context):
            if code is not None and pid not in self._known:
                rank, attempt = _place(context, local_rank)
                self._end(rank, pid, code, attempt, by_launcher)

    def _end(self, rank: int, pid: int, code: int, attempt: int, by_launcher: bool) -> None:
        self._known.add(pid)
        at = self._clock.ended(pid)
        self._write(
            ProcessEnded(
                at=at,
                rank=rank,
                pid=pid,
                wall=time.time() - (time.monotonic() - at),
                status=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                by_launcher=by_launcher,
                attempt=attempt,
            )
        )

    def _write(self, event: Event) -> None:
        if self._writer:
            self._writer.write(event, vital=True)


def _place(context: Any, local_rank: int) -> tuple[int, int]:
    """Global rank and attempt of a worker."""
    env = context.envs[local_rank]
    return int(env["RANK"]), int(env.get("TORCHELASTIC_RESTART_COUNT", 0))


def _codes(context: Any) -> Iterator[tuple[int, int, int | None]]:
    """(local rank, pid, exit code or None) of every worker; asking twice changes nothing."""
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers:
        for local_rank, handler in handlers.items():
            yield local_rank, handler.proc.pid, handler.proc.poll()
        return
    spawned = getattr(context, "_pc", None)
    for local_rank, process in enumerate(spawned.processes if spawned else ()):
        yield local_rank, process.pid, process.exitcode


class _Quiet:
    """Suppresses errors of the observer, so that torchrun continues."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is not None and issubclass(kind, Exception) and not _is_torchruns(kind)


def _is_torchruns(kind: type[BaseException]) -> bool:
    return kind.__name__ == "SignalException"


class _Patience:
    """Defers further signals while torchrun ends its workers.

    A scheduler signals every process of a job, so that the agent gets SIGTERM twice: from it and
    from the supervisor. A second one in the middle of the clean-up would leave ranks behind.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._stopping = False

    def __enter__(self) -> None:
        current = sys.exc_info()[0]
        self._stopping = current is not None and _is_torchruns(current)
        try:
            for number in _DEFERRED:
                self._handlers[number] = signal.signal(
                    number, lambda came, _: self._came.append(came)
                )
        except ValueError:  # not in the main thread
            return

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._came and not self._stopping:
            signal.raise_signal(self._came[0])
