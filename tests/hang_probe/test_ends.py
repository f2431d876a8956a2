"""What the probe writes down of a rank's end, without spawning a rank."""

from __future__ import annotations

import importlib
import io
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.analysis.waiting.failures import failure
from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    GroupDestroyed,
    RankExiting,
    Site,
    SpawnEnded,
    ThreadFailed,
)
from ddpdoctor.probe.collectives import process_groups
from ddpdoctor.probe.collectives.process_groups import ProcessGroups
from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.recording.patching import restore
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.probe.watchers.process import exits, spawned_processes
from ddpdoctor.probe.watchers.process.caught_exceptions import CaughtExceptions
from ddpdoctor.run import Rank
from ddpdoctor.storage.run_folder import EventWriter, Lines


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    yield Recorder(writer, tmp_path, "rank-0", {})
    writer.close()


def events(recorder: Recorder) -> list[Event]:
    return list(Lines(recorder.writer.path).events())


def test_a_group_is_gone_from_when_it_is_destroyed(recorder: Recorder) -> None:
    token = ProcessGroups.current._destroying(recorder, (), {})
    begun = time.monotonic()
    ProcessGroups.current._destroyed(recorder, token, None, None)
    (event,) = (e for e in events(recorder) if isinstance(e, GroupDestroyed))
    assert event.at <= begun


@pytest.mark.parametrize(
    ("name", "file", "ended"),
    [("__main__", "train.py", True), ("__main__", "<console>", False), ("other", "o.py", False)],
)
def test_a_hook_of_the_programs_own_hides_no_exception(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, name: str, file: str, ended: bool
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    try:
        exec(compile("def f():\n    1 / 0\nf()", file, "exec"), {"__name__": name})
    except ZeroDivisionError as error:
        assert error.__traceback__ is not None
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__.tb_next, raising=False)
    exits._leaving()
    raised = [e for e in events(recorder) if isinstance(e, ExceptionRaised)]
    (leaving,) = (e for e in events(recorder) if isinstance(e, RankExiting))
    assert [(e.kind, e.frames[-1].line) for e in raised] == [("ZeroDivisionError", 2)] * ended
    assert (leaving.how, leaving.status) == (("exception", 1) if ended else ("return", None))


def test_a_thread_that_fails_is_told_and_ends_nothing(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    monkeypatch.setattr(current, "recorder", recorder)
    exits._wrap_thread_excepthook()
    try:
        for error in (OSError("no space"), SystemExit(3)):
            thread = threading.Thread(target=_raise, args=(error,), name="prefetch")
            thread.start()
            thread.join()
    finally:
        restore()
    exits._leaving()
    (failed,) = (e for e in events(recorder) if isinstance(e, ThreadFailed))
    assert (failed.thread, failed.kind, failed.message) == ("prefetch", "OSError", "no space")
    assert failed.frames[-1].function == "_raise"
    assert told == ["no space", "3"], "whoever was to print it does"
    (leaving,) = (e for e in events(recorder) if isinstance(e, RankExiting))
    assert (leaving.how, leaving.status) == ("return", None)


def _raise(error: BaseException) -> None:
    raise error


def test_an_exit_from_a_thread_ends_that_thread_only(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    monkeypatch.setattr(current, "recorder", recorder)
    exits._wrap_exits()
    try:
        thread = threading.Thread(target=lambda: sys.exit(77))
        thread.start()
        thread.join()
    finally:
        restore()
    exits._leaving()
    (leaving,) = (e for e in events(recorder) if isinstance(e, RankExiting))
    assert (leaving.how, leaving.status) == ("return", None)


@pytest.mark.parametrize(("status", "said"), [("no more data", "no more data"), (3, "")])
def test_what_an_exit_prints_is_kept(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, status: object, said: str
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    exits._note_exit(recorder, status)
    exits._leaving()
    (leaving,) = (e for e in events(recorder) if isinstance(e, RankExiting))
    assert leaving.message == said


class _Left(Exception):
    """In place of the end of the process."""


def _leave(status: object) -> None:
    raise _Left


@pytest.mark.parametrize(
    ("module", "function", "how", "caught"),
    [
        ("train", "sys.exit", "sys.exit", True),
        ("train", "os._exit", "os._exit", True),
        ("torch.multiprocessing.spawn", "sys.exit", "exception", False),
    ],
)
@pytest.mark.parametrize("status", [1, 0])
def test_what_is_handled_where_a_process_exits(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    function: str,
    how: str,
    caught: bool,
    status: int,
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    monkeypatch.setattr(sys, "exit", _leave)
    monkeypatch.setattr(os, "_exit", _leave)
    exits._wrap_exits()
    text = f"import os, sys\ntry: 1 / 0\nexcept ArithmeticError: {function}({status})"
    try:
        with pytest.raises(_Left):
            exec(compile(text, "train.py", "exec"), {"__name__": module})
    finally:
        restore()
    exits._leaving()
    raised = [e for e in events(recorder) if isinstance(e, ExceptionRaised)]
    (leaving,) = (e for e in events(recorder) if isinstance(e, RankExiting))
    expected = [("ZeroDivisionError", 2, caught)] * status
    assert [(e.kind, e.frames[-1].line, e.caught) for e in raised] == expected
    if status or caught:
        assert (leaving.how, leaving.status) == (how, status)


@pytest.mark.parametrize("statement", ["exit()", "quit(3)"])
def test_the_line_that_calls_exit_of_the_site_module(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statement: str
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    exits._wrap_exits()
    script = str(tmp_path / "train.py")
    try:
        with pytest.raises(SystemExit) as left:
            exec(compile(f"\n{statement}", script, "exec"), {"__name__": "__main__"})
    finally:
        restore()
    exits._leaving()
    (leaving,) = (e for e in events(recorder) if isinstance(e, RankExiting))
    (site,) = (e for e in events(recorder) if isinstance(e, Site) and e.id == leaving.site)
    assert (leaving.how, leaving.status) == ("sys.exit", left.value.code or 0)
    assert (site.file, site.line) == (script, 2)


@pytest.mark.parametrize("cause", ["", " from None", " from error"])
def test_what_was_handled_as_an_exception_was_raised(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    text = f"try:\n    1 / 0\nexcept Exception as error:\n    raise OSError('boom'){cause}"
    with pytest.raises(OSError, match="boom") as caught:
        exec(compile(text, "train.py", "exec"), {})
    exits.note_exception(caught.value, caught.tb)
    (raised,) = (e for e in events(recorder) if isinstance(e, ExceptionRaised))
    assert (raised.kind, raised.frames[-1].line) == ("OSError", 4)
    assert raised.first is not None
    assert (raised.first.kind, raised.first.frames[-1].line) == ("ZeroDivisionError", 2)
    assert exits._root_context(recorder, ValueError()) is None


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_that_cannot_say_what_it_is_has_a_name_and_a_line(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    with pytest.raises(Mute) as caught:
        raise Mute
    exits.note_exception(caught.value, caught.tb)
    (raised,) = (e for e in events(recorder) if isinstance(e, ExceptionRaised))
    assert raised.kind.endswith("Mute") and raised.frames
    assert raised.message == "<its __str__ failed>"


HANDLED = """
def main():
    try:
        1 / 0
    except ArithmeticError:
        tell()
tell = lambda: {tell}
main()
{more}
sys.exit({status})
"""


@pytest.mark.parametrize(
    ("tell", "more", "status", "named"),
    [
        ("log.exception('failed')", "", 1, True),
        ("log.error('failed')", "", 1, True),
        ("traceback.print_exc()", "", 1, True),
        ("traceback.format_exc()", "", 1, True),
        ("traceback.format_exc()", "", 0, False),
        ("None", "", 1, False),
        ("log.error('failed')", "active.step += 1", 1, False),
        ("log.error('failed')", "call()", 1, False),
        ("log.error('failed')", "wait()", 1, False),
    ],
)
def test_what_was_told_of_before_a_process_exits(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    tell: str,
    more: str,
    status: int,
    named: bool,
) -> None:
    monkeypatch.setattr(current, "recorder", recorder)
    monkeypatch.setattr(exits, "_ending", exits._Ending())
    monkeypatch.setattr(exits, "_last_call", lambda recorder: len(calls))
    monkeypatch.setattr(sys, "exit", _leave)
    calls: list[int] = []
    known = {
        "log": logging.getLogger("train"), "traceback": traceback, "sys": sys, "active": recorder,
        "call": lambda: calls.append(1),
        "wait": lambda: monkeypatch.setattr(exits, "_JUST_BEFORE_S", 0.0),
    }  # fmt: skip
    exits._wrap_exits()
    exits.listen()
    CaughtExceptions.begin()
    text = HANDLED.format(tell=tell, more=more, status=status)
    try:
        with pytest.raises(_Left):
            exec(compile(text, "train.py", "exec"), known)
    finally:
        restore()
        hooks.forget()
    exits._leaving()
    raised = [(e.kind, e.caught) for e in events(recorder) if isinstance(e, ExceptionRaised)]
    assert raised == [("ZeroDivisionError", True)] * named


CHILD = """
import multiprocessing, os, sys
from pathlib import Path
from ddpdoctor.probe.watchers.process import exits as process
from ddpdoctor.probe.recording.patching import restore
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.storage.run_folder import EventWriter

def main(ends):
    folder = Path(".").resolve()
    active = Recorder(EventWriter(folder / "rank-0.jsonl"), folder, "rank-0", {})
    set_recorder(active)  # in the middle of the process's function, as `init_process_group` does
    process.install(active)
    exec(compile(ends, "train.py", "exec"), {"__name__": "train"})

if __name__ == "__main__":
    method, ends = sys.argv[1:]
    child = multiprocessing.get_context(method).Process(target=main, args=(ends,))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("ends", "how", "status", "line"),
    [
        ("pass", "return", 0, 0),
        ("try: exit(9)\nexcept SystemExit: pass", "return", 0, 0),
        ("\nraise OSError('disk full')", "exception", 1, 2),
        ("import sys\n\nsys.exit(9)", "sys.exit", 9, 3),
        ("raise SystemExit('no more data')", "sys.exit", 1, 1),
        ("import os\nos._exit(3)", "os._exit", 3, 2),
    ],
)
def test_how_the_function_of_a_process_ends(
    tmp_path: Path, method: str, ends: str, how: str, status: int, line: int
) -> None:
    """`multiprocessing` catches what comes out of it, prints it, and exits with a status."""
    rank, printed = child_of(tmp_path, CHILD, method, ends)
    leaving = rank.latest(RankExiting)
    assert leaving is not None, printed
    assert (leaving.how, leaving.status) == (how, status)
    found = failure(rank)
    assert (found is not None) == (status != 0)
    if found is not None:
        assert found.location is not None and found.location.line == line
        assert (found.exception is not None) == (how == "exception")
        assert found.message in printed


@pytest.mark.parametrize("leave", ["raise SystemExit(4)", "import sys; sys.exit(4)"])
def test_the_function_of_a_process_leaves_because_of_what_it_caught(
    tmp_path: Path, leave: str
) -> None:
    ends = f"try:\n    int('many')\nexcept ValueError:\n    {leave}"
    rank, _ = child_of(tmp_path, CHILD, "fork", ends)
    (raised,) = rank.of(ExceptionRaised)
    assert raised.caught and raised.kind == "ValueError"
    found = failure(rank)
    assert found is not None and found.status == 4
    assert found.location is not None and found.location.line == 2


def test_the_function_of_a_process_leaves_well_in_spite_of_what_it_caught(tmp_path: Path) -> None:
    ends = "try:\n    int('many')\nexcept ValueError:\n    raise SystemExit"
    rank, _ = child_of(tmp_path, CHILD, "fork", ends)
    assert not rank.of(ExceptionRaised) and failure(rank) is None


SCRIPT = """
import signal, sys
from pathlib import Path
from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.watchers.process import exits as process
from ddpdoctor.probe.recording.recorder import Recorder, set_recorder
from ddpdoctor.storage.run_folder import EventWriter

folder = Path(".").resolve()
active = Recorder(EventWriter(folder / "rank-0.jsonl"), folder, "rank-0", {})
set_recorder(active)
process.install(active)

def stop(*_):
    raise SystemExit(int(sys.argv[1]))

signal.signal(signal.SIGUSR1, stop)
try:
    signal.raise_signal(signal.SIGUSR1)
except sys.argv[2] == "all" and SystemExit or Exception:
    pass
"""


@pytest.mark.parametrize(
    ("status", "caught", "how"),
    [
        ("0", "none", "sys.exit"),
        ("143", "none", "sys.exit"),
        ("0", "all", "return"),
    ],
)
def test_an_exit_that_a_signal_handler_raised(
    tmp_path: Path, status: str, caught: str, how: str
) -> None:
    rank, printed = child_of(tmp_path, SCRIPT, status, caught)
    leaving = rank.latest(RankExiting)
    assert leaving is not None, printed
    assert (leaving.how, leaving.site) == (how, -1)


def test_what_the_parent_handled_did_not_end_its_child(tmp_path: Path) -> None:
    handling = "    try: 1 / 0\n    except ZeroDivisionError: child.start()\n"
    program = CHILD.replace("    child.start()\n", handling)
    rank, _ = child_of(tmp_path, program, "fork", "pass")
    assert rank.latest(RankExiting) is not None
    assert failure(rank) is None


def child_of(folder: Path, program: str, method: str, ends: str) -> tuple[Rank, str]:
    (folder / "parent.py").write_text(program)
    command = [sys.executable, "parent.py", method, ends]
    done = subprocess.run(command, cwd=folder, timeout=60, capture_output=True, text=True)
    rank = Rank(0)
    for event in Lines(folder / "rank-0.jsonl").events():
        rank.add(event)
    return rank, done.stderr


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("gloo", "cpu:gloo,cuda:gloo", "gloo"),
        ("undefined", "cpu:gloo", "gloo"),
        ("undefined", "cpu:gloo,cuda:nccl", "nccl"),
    ],
)
def test_the_backend_where_nobody_chose_one(
    monkeypatch: pytest.MonkeyPatch, name: str, config: str, told: str
) -> None:
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: name)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: config)
    assert process_groups._backend(None) == told


@pytest.mark.parametrize("code", [-15, -9, 7, None])
def test_which_of_the_spawned_processes_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    module = importlib.import_module("torch.multiprocessing.spawn")
    monkeypatch.setenv("DDPDOCTOR_DIR", str(tmp_path))
    monkeypatch.delenv("DDPDOCTOR_OWNER", raising=False)
    node = EventWriter(path := tmp_path / "node-0.jsonl")
    processes = [SimpleNamespace(pid=n, exitcode=c) for n, c in ((7, code), (8, -15), (9, 1))]

    def join(self: object, timeout: float | None = None) -> bool:
        if code is None:
            raise module.ProcessRaisedException("boom", 0, 7)
        raise module.ProcessExitedException("gone", 0, 7, code)

    monkeypatch.setattr(module.ProcessContext, "join", join)
    spawned_processes.watch_spawned(module)
    try:
        with pytest.raises(module.ProcessException):
            module.ProcessContext.join(SimpleNamespace(processes=processes))
    finally:
        restore()
    node.close()
    ends = [e for e in Lines(path).events() if isinstance(e, SpawnEnded)]
    status, number = (code, None) if code == 7 else (None, code and -code)
    told = [(7, status, number, (8,))] if code else []
    assert [(e.pid, e.status, e.signal, e.told) for e in ends] == told
