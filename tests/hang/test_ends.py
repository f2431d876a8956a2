"""What the probe writes down of a rank's end, without spawning a rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.events import Event, ExceptionRaised, GroupDestroyed, RankExiting
from ddpdoctor.probe import groups, process
from ddpdoctor.probe.recorder import Recorder, current
from ddpdoctor.runfolder import EventWriter, Lines


@pytest.fixture
def active(tmp_path: Path) -> Iterator[Recorder]:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    yield Recorder(writer, tmp_path, "rank-0", {})
    writer.close()


def events(active: Recorder) -> list[Event]:
    return list(Lines(active.writer.path).events())


def test_a_group_is_gone_from_when_it_is_destroyed(active: Recorder) -> None:
    token = groups._destroying(active, (), {})
    begun = time.monotonic()
    groups._destroyed(active, token, None, None)
    (event,) = (e for e in events(active) if isinstance(e, GroupDestroyed))
    assert event.at <= begun


@pytest.mark.parametrize(
    ("name", "file", "ended"),
    [("__main__", "train.py", True), ("__main__", "<console>", False), ("other", "o.py", False)],
)
def test_a_hook_of_the_programs_own_hides_no_exception(
    active: Recorder, monkeypatch: pytest.MonkeyPatch, name: str, file: str, ended: bool
) -> None:
    monkeypatch.setattr(current, "recorder", active)
    monkeypatch.setattr(process, "_ending", process._Ending())
    try:
        exec(compile("def f():\n    1 / 0\nf()", file, "exec"), {"__name__": name})
    except ZeroDivisionError as error:
        assert error.__traceback__ is not None
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__.tb_next, raising=False)
    process._leaving()
    raised = [e for e in events(active) if isinstance(e, ExceptionRaised)]
    (leaving,) = (e for e in events(active) if isinstance(e, RankExiting))
    assert [(e.kind, e.frames[-1].line) for e in raised] == [("ZeroDivisionError", 2)] * ended
    assert (leaving.how, leaving.status) == (("exception", 1) if ended else ("return", None))


@pytest.mark.parametrize(("status", "said"), [("no more data", "no more data"), (3, "")])
def test_what_an_exit_prints_is_kept(
    active: Recorder, monkeypatch: pytest.MonkeyPatch, status: object, said: str
) -> None:
    monkeypatch.setattr(current, "recorder", active)
    monkeypatch.setattr(process, "_ending", process._Ending())
    process._note_exit(active, status)
    process._leaving()
    (leaving,) = (e for e in events(active) if isinstance(e, RankExiting))
    assert leaving.message == said


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
    assert groups._backend(None) == told
