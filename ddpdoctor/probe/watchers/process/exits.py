"""How does this rank's process end: by return, exception, exit status or signal?

Exception hooks, `sys.exit`, `os._exit` and `atexit` are watched. An exit with a bad status is
attributed to the exception that the program caught just before.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from ....events import ExceptionRaised, Frame, RankExiting, Relayed, ThreadFailed, Unset
from ...collectives import call_hooks
from ...recording import hooks, stack_file
from ...recording.code_locations import USER
from ...recording.frames import disguise
from ...recording.patching import replace
from ...recording.recorder import Recorder, current_recorder, guarded
from ...source.exception_lines import never_set, pointed_at
from ...source.statements import enclosing
from ...training import lifecycle, records
from .caught_exceptions import raised_at
from .given_optimizers import given_optimizers
from .worker_exceptions import relayed

MESSAGE_LIMIT = 8000
FRAME_LIMIT = 60
_CHAIN_LIMIT = 20
_STARTERS = (
    "multiprocessing.popen_fork",
    "multiprocessing.spawn",
    "multiprocessing.forkserver",
    "torch.multiprocessing.spawn",
)
"""Modules that call the program's function in a new process and exit after it."""
_LOST = "lines that raise SystemExit"
_JUST_BEFORE_S = 10.0
"""An exit within this time after a caught exception counts as caused by it."""
_STARTING = 5
"""Frames at the start of a traceback that may belong to the start of Python (`python -m`)."""


class _Ending:
    """How the process ends, as far as is known."""

    how = "return"
    status: int | None = None
    site = -1
    message = ""
    caught: tuple[int, ExceptionRaised] | None = None
    """Number of the last collective that raised, and its exception."""
    handled: tuple[int, ExceptionRaised] | None = None
    """Number of the last collective before the program last logged a caught exception, and that
    exception."""
    lines: Sequence[tuple[CodeType, int]] = ()
    """Lines of the traceback of `handled`."""
    passed = -1
    """Site that raised the last `SystemExit` to leave a forward or a backward."""
    emitted = False
    stays = False


_ending = _Ending()


def install(recorder: Recorder) -> None:
    """Watch the end of this process; hooks the user has installed are still called."""
    global _ending
    _ending = _Ending()
    stack_file.watch(recorder)
    _wrap_excepthook()
    _wrap_thread_excepthook()
    _wrap_exits()
    atexit.register(_at_exit)


def listen() -> None:
    """Subscribe to failures that may end this process; to be called once torch is wrapped."""
    lifecycle.forward_failed.subscribe(_note_system_exit, lost=_LOST)
    lifecycle.backward_failed.subscribe(_note_system_exit, lost=_LOST)
    hooks.handled.subscribe(_handled, lost="what this rank caught before it left")
    call_hooks.call_failed.subscribe(_call_failed, lost="what this rank caught before it left")


def uninstall() -> None:
    atexit.unregister(_at_exit)
    stack_file.drop()


def failed() -> bool:
    """Whether an exception or an exit status ends this process."""
    return bool(_ending.status)


def leave() -> None:
    """End the record of this rank, though its process and process groups may live on."""
    _ending.stays = True
    _leaving()


def _wrap_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        note_exception(error, trace)
        previous(kind, error, trace)

    replace(sys, "excepthook", excepthook)


def _wrap_thread_excepthook() -> None:
    previous = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        guarded("thread", lambda recorder: _note_thread(recorder, args), lost="threads that failed")
        previous(args)

    replace(threading, "excepthook", excepthook)


def _note_thread(recorder: Recorder, args: threading.ExceptHookArgs) -> None:
    """Record a failed thread: the rank may wait for its work forever."""
    error = args.exc_value
    if error is None or isinstance(error, SystemExit):  # ends the thread silently
        return
    recorder.emit(
        ThreadFailed(
            at=time.monotonic(),
            thread=args.thread.name if args.thread is not None else "",
            kind=qualified(args.exc_type),
            message=text_of(error)[:MESSAGE_LIMIT],
            frames=_frames(recorder, args.exc_traceback),
            step=recorder.step,
        ),
        vital=True,
    )


def _wrap_exits() -> None:
    leave, vanish, quit = sys.exit, os._exit, _sitebuiltins.Quitter.__call__
    finish = multiprocessing.util._exit_function  # type: ignore[attr-defined]

    def exit(status: Any = None, /) -> NoReturn:
        caller = sys._getframe().f_back
        if guarded("sys.exit", lambda _: _called_by_starter(caller)):
            _ending.status = status
            if _ending.how != "exception":  # else the exception is already recorded
                _note_handled(status, sys.exc_info()[1], caught=False)
        elif threading.current_thread() is threading.main_thread():  # others end only themselves
            guarded("sys.exit", lambda recorder: _note_exit(recorder, status))
        leave(status)

    def __call__(quitter: Any, code: Any = None) -> NoReturn:
        # `exit()` and `quit()` of the `site` module raise `SystemExit` by themselves.
        if threading.current_thread() is threading.main_thread():
            guarded("sys.exit", lambda recorder: _note_exit(recorder, code))
        quit(quitter, code)

    def _exit(status: int) -> NoReturn:
        if current_recorder() is not None and not _ending.emitted:
            caller = sys._getframe().f_back
            if guarded("os._exit", lambda _: _called_by_starter(caller)):
                _ending.status = status
            else:
                _ending.how, _ending.status = "os._exit", status
                guarded("os._exit", _note_site)
                _note_handled(status, sys.exc_info()[1])
            _leaving()
        vanish(status)

    def _exit_function(*args: Any, **kwargs: Any) -> None:
        caller = sys._getframe().f_back  # None where the interpreter itself calls
        if caller is not None and caller.f_globals.get("__name__") == "multiprocessing.process":
            guarded("multiprocessing", lambda recorder: _note_child(recorder, caller))
        finish(*args, **kwargs)

    for owner, name, original, wrapper in (
        (sys, "exit", leave, exit),
        (_sitebuiltins.Quitter, "__call__", quit, __call__),
        (os, "_exit", vanish, _exit),
        (multiprocessing.util, "_exit_function", finish, _exit_function),
    ):
        replace(owner, name, disguise(wrapper, original))
    _exit.__module__ = "os"  # for pickle: `posix`, the original's module, still has the original


def _called_by_starter(caller: FrameType | None) -> bool:
    """Whether the exit comes from the module that started the program's function in this process,
    not from the program."""
    return caller is not None and caller.f_globals.get("__name__") in _STARTERS


def _note_child(recorder: Recorder, caller: FrameType) -> None:
    """Note how the function of a `multiprocessing.Process` ended.

    `caller` calls this in the `finally` around that function; an exception is still being handled.
    """
    error = sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    if error is None or trace is None or trace.tb_frame is not caller:
        # Anything else being handled is inherited from the parent, which forked inside a handler.
        _ending.how, _ending.status, _ending.site, _ending.message = "return", None, -1, ""
    elif not isinstance(error, SystemExit):
        note_exception(error, trace)
    elif _ending.how != "exception":  # else spawn caught the exception, recorded it and exits
        _note_raised(error, raised_at(recorder, trace, -1))


def _note_exit(recorder: Recorder, status: Any) -> None:
    _note_status(status, recorder.site())
    if _ending.status and (frame := recorder.sites.user_frame(sys._getframe(1))) is not None:
        hooks.failing.fire(recorder, (None, [f for f, _ in traceback.walk_stack(frame)]))
    _note_handled(_ending.status, sys.exc_info()[1])


def _note_raised(error: SystemExit, site: int) -> None:
    """Note a `SystemExit` that left the program; the wrapper of `sys.exit` may have noted it."""
    emitted = (_ending.how, _ending.site) == ("sys.exit", site)
    _note_status(error.code, site)
    if not emitted:
        _note_handled(_ending.status, error.__context__)


def _note_handled(status: Any, handled: BaseException | None, *, caught: bool = True) -> None:
    """Record the exception being handled as the cause of an exit with a bad status."""
    if status and handled is not None and not isinstance(handled, SystemExit):
        _ending.caught = _ending.handled = None
        note_exception(handled, handled.__traceback__, caught=caught)


def note_exit(error: SystemExit, trace: TracebackType | None) -> None:
    """Note a `SystemExit` that leaves the doctor's `with` block."""
    guarded(
        "sys.exit", lambda recorder: _note_raised(error, raised_at(recorder, trace, _ending.site))
    )


def _note_status(status: Any, site: int) -> None:
    _ending.how, _ending.site = "sys.exit", site
    _ending.status = int(status or 0) if isinstance(status, int | None) else 1
    _ending.message = status[:MESSAGE_LIMIT] if isinstance(status, str) else ""


def _note_site(recorder: Recorder) -> None:
    _ending.site = recorder.site()


def note_exception(
    error: BaseException, trace: TracebackType | None, *, caught: bool = False
) -> None:
    """Record an exception that ended the program (or, `caught`, that the program swallowed)."""

    def note(recorder: Recorder) -> None:
        if not caught:
            _ending.how, _ending.status = "exception", 1
            left = [frame for frame, _ in traceback.walk_tb(trace)]
            hooks.failing.fire(recorder, (error, left[::-1]))
        recorder.emit(
            _exception_event(recorder, error, _frames(recorder, trace), caught), vital=True
        )

    guarded("exception", note, lost="the exception that ended this rank")


def _call_failed(recorder: Recorder, failed: tuple[int, BaseException]) -> None:
    """Remember the exception of a collective: if no other call follows before an exit, the program
    exits because of it."""
    number, error = failed
    _ending.caught = number, _exception_event(recorder, error, _callers(recorder), True)


def _handled(recorder: Recorder, error: BaseException) -> None:
    """Remember an exception that a handler logged: the program may exit because of it."""
    if isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        lines = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
        known = _ending.handled[1].frames if _ending.handled and _ending.lines == lines else None
        # Reuse the frames of an equal traceback: a loop may log the same exception many times.
        frames = known or _frames(recorder, error.__traceback__)
        _ending.lines = lines
        _ending.handled = _last_call(recorder), _exception_event(recorder, error, frames, True)


def _last_call(recorder: Recorder) -> int:
    """Number of the last collective in the call log, -1 before the first."""
    return recorder.call_log.ring.newest if recorder.call_log is not None else -1


def _exception_event(
    recorder: Recorder, error: BaseException, frames: tuple[Frame, ...], caught: bool
) -> ExceptionRaised:
    text, now = text_of(error), time.monotonic()
    return ExceptionRaised(
        at=now,
        kind=qualified(type(error)),
        message=text[:MESSAGE_LIMIT],
        frames=frames + _pointed_at(recorder, error),
        caught=caught,
        step=recorder.step,
        relayed=relayed(text, recorder.sites, MESSAGE_LIMIT),
        first=_root_context(recorder, error),
        still_s=round(now - recorder.call_log.ring.progress_at, 3) if recorder.call_log else -1.0,
        unset=_unset(recorder, error),
        optimizers=given_optimizers(recorder, error),
    )


def _unset(recorder: Recorder, error: BaseException) -> Unset | None:
    found = never_set(error)
    if found is None:
        return None
    return Unset(found.name, recorder.sites.place(found.file, found.line, ""), found.under)


def _root_context(recorder: Recorder, error: BaseException) -> Relayed | None:
    """The first exception in the chain of contexts, even behind `raise ... from None`; None if the
    exception has no context."""
    first = error
    for _ in range(_CHAIN_LIMIT):
        if first.__context__ is None:
            break
        first = first.__context__
    if first is error or not isinstance(first, Exception):
        return None
    frames = _frames(recorder, first.__traceback__)
    return Relayed("", qualified(type(first)), text_of(first)[:MESSAGE_LIMIT], frames)


def qualified(kind: type[BaseException]) -> str:
    """Name of an exception class with its module, without `builtins`."""
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Text of an exception; never raises."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({error.filename}, line {error.lineno})"
    try:
        return str(error)
    except Exception:
        return "<its __str__ failed>"


def _frames(recorder: Recorder, trace: TracebackType | None) -> tuple[Frame, ...]:
    frames = [_frame(recorder, f.f_code, line) for f, line in traceback.walk_tb(trace)]
    return tuple(frames[-FRAME_LIMIT:])


def _pointed_at(recorder: Recorder, error: BaseException) -> tuple[Frame, ...]:
    if (place := pointed_at(recorder.sites, error)) is None:
        return ()
    recorder.sites.place(*place)
    file, line, function = place
    inside = enclosing(file, line)
    return (Frame(os.path.abspath(file), line, function, user=True, inside=inside),)


def _callers(recorder: Recorder) -> tuple[Frame, ...]:
    """The user's frames on the stack, outermost first."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < FRAME_LIMIT:
        if recorder.sites.kind(frame.f_code) == USER:
            frames.append(_frame(recorder, frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(frames))


def _frame(recorder: Recorder, code: CodeType, line: int) -> Frame:
    user = recorder.sites.kind(code) == USER
    if user:  # record the text of the line too
        recorder.sites.number(code, line)
    file = os.path.abspath(code.co_filename)
    inside = enclosing(code.co_filename, line) if user else ()
    return Frame(file=file, line=line, function=code.co_name, user=user, inside=inside)


def _note_system_exit(recorder: Recorder, what: records.Forward | records.Backward) -> None:
    if isinstance(what.error, SystemExit):
        _ending.passed = raised_at(recorder, what.error.__traceback__, -1)


def _at_exit() -> None:
    guarded("exit", _note_cut_script)
    _leaving()


def _note_cut_script(_: Recorder) -> None:
    if _ending.how == "return" and _cut_short():
        _ending.how, _ending.site = "sys.exit", _ending.passed


def _cut_short() -> bool:
    """Whether `SystemExit` ended the script without `sys.exit` (raised in a signal handler, say).

    Python deletes `__file__` of the main module when a script comes to its end, and only then.
    """
    main = vars(sys.modules["__main__"])
    run_by_python = isinstance(main.get("__loader__"), SourceFileLoader)
    is_script = run_by_python and main.get("__spec__") is None
    return is_script and main.get("__name__") == "__main__" and "__file__" in main


def _leaving() -> None:
    if _ending.emitted or current_recorder() is None:
        return
    _ending.emitted = True
    guarded("exception", _note_last_value, lost="the exception that ended this rank")
    guarded("leaving", lambda recorder: hooks.leaving.fire(recorder, None))
    guarded("leaving", _emit_end)
    guarded("left", lambda recorder: hooks.left.fire(recorder, None))


def _note_last_value(recorder: Recorder) -> None:
    """Record the exception that ended the program if its own `sys.excepthook` replaced ours: Python
    keeps it in `sys.last_value`."""
    error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if error is None or _ending.how == "exception" or not _left_the_program(trace):
        return
    status = _ending.status
    note_exception(error, trace)
    _ending.status = status or _ending.status


def _left_the_program(trace: TracebackType | None) -> bool:
    """Whether an exception left the main module, and not a line typed at a prompt."""
    for _ in range(_STARTING):
        if trace is None:
            return False
        frame = trace.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return not frame.f_code.co_filename.startswith("<")
        trace = trace.tb_next
    return False


def _emit_end(recorder: Recorder) -> None:
    recorder.emit_cost(anyway=True)
    if (raised := _cause_of_exit(recorder)) is not None:
        recorder.emit(raised, vital=True)
    recorder.emit(
        RankExiting(
            at=time.monotonic(),
            how=_ending.how,
            status=_ending.status,
            site=_ending.site,
            groups_alive=0 if _ending.stays else _groups_alive(),
            message=_ending.message,
            torch_imported="torch" in sys.modules,
        ),
        vital=True,
    )


def _cause_of_exit(recorder: Recorder) -> ExceptionRaised | None:
    """The exception that the program caught just before it exited: of its last collective, or one
    logged since in the same step."""
    if _ending.how == "exception":
        return None
    newest, now = _last_call(recorder), time.monotonic()
    if _ending.caught and _ending.caught[0] == newest:
        return _ending.caught[1]
    unknown = _ending.how == "sys.exit" and _ending.status is None
    if _ending.handled and (_ending.status or unknown):
        number, raised = _ending.handled
        if (number, raised.step) == (newest, recorder.step) and now - raised.at < _JUST_BEFORE_S:
            return raised
    return None


def _groups_alive() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    with contextlib.suppress(AttributeError):
        return len(dist.distributed_c10d._world.pg_map)
    return 1
