"""Looking at the user's variables leaves nothing behind and changes nothing."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ddpdoctor.probe.recording.frames import updates_statistics, variables
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.source.line_tracer import LINES_AT_MOST, Tracer
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.training.steady_state import PlannedCall
from ddpdoctor.storage.run_folder import EventWriter


class Thing:
    pass


def looked_at() -> tuple[bool, bool]:
    thing = Thing()
    gone = weakref.ref(thing)
    seen = variables(sys._getframe())["thing"] is thing
    del thing
    return seen, gone() is None


def test_nothing_is_kept_alive() -> None:
    assert looked_at() == (True, True)


def test_the_module_has_its_names() -> None:
    names: dict[str, Any] = {}
    exec("frame = sys._getframe(); a = 1", {"sys": sys}, names)
    assert variables(names["frame"])["a"] == 1


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="`locals()` is a copy there")
def test_what_locals_gave_stays_as_it_was() -> None:
    kept = locals()
    later = 1
    assert not variables(sys._getframe())
    assert "later" not in kept
    assert later


def test_variables_of_a_function_that_is_traced_are_left_alone() -> None:
    seen = []

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        seen.append(variables(frame))
        return look

    def traced() -> int:
        one = 1
        two = 2
        return one + two

    before = sys.gettrace()
    sys.settrace(look)
    try:
        total = traced()
    finally:
        sys.settrace(before)
    assert total == 3
    assert seen[-1] == {"one": 1, "two": 2}


def followed(recorder: Recorder) -> tuple[int, bool]:
    number = 0
    thing = Thing()
    gone = weakref.ref(thing)
    tracer = Tracer.start(recorder, "parameters", lambda: number)
    if tracer is None:
        pytest.skip("a debugger or coverage is at work")
    number = 1
    found = tracer.stop()
    del thing
    return found[0][1] if found else -1, gone() is None


def test_following_lines_keeps_nothing_alive(tmp_path: Path) -> None:
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    recorder.sites.kinds[__file__] = "user"
    assert followed(recorder) == (line_of("number = 1"), True)


def test_all_lines_that_change_it_are_told_but_what_is_passed_over(tmp_path: Path) -> None:
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    recorder.sites.kinds[__file__] = "user"
    box = [0]
    tracer = Tracer.start(recorder, "gradients", partial(box.__getitem__, 0))
    if tracer is None:
        pytest.skip("a debugger or coverage is at work")
    box[0] = 5
    box.__setitem__(0, 6), tracer.pass_over()
    box[0] = 7
    lines = [line for _, line in tracer.stop()]
    assert lines == [line_of("box[0] = 5"), line_of("box[0] = 7")]


@pytest.mark.parametrize("part", ["_over", "_compare", "_stop_tracing", "_follows"])
def test_what_fails_while_lines_are_followed_does_not_reach_the_program(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    recorder.sites.kinds[__file__] = "user"
    tracer = Tracer.start(recorder, "gradients", lambda: 0)
    if tracer is None:
        pytest.skip("a debugger or coverage is at work")
    with monkeypatch.context() as patch:
        patch.setattr(Tracer, part, lambda *given: 1 / 0)
        tracer._lines = LINES_AT_MOST + (part == "_stop_tracing")
        assert line_of("assert line_of") > 0
        sys.settrace(None)
    tracer._stop_tracing()
    assert "ZeroDivisionError" in (tmp_path / "rank-0.jsonl").read_text()


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


def test_a_module_that_notes_its_arguments_by_locals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was made is told although its constructor is out of reach."""
    torch = pytest.importorskip("torch")
    notes: list[str] = []
    monkeypatch.setattr(ModuleOrigins.current, "is_user", lambda code: code.co_filename == __file__)

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 8) -> None:
            given = locals()
            super().__init__()
            late = ModuleOrigins.current._record_origin(self, sys._getframe())
            notes.extend(given)

    net = Net()
    assert ModuleOrigins.current.lines[net][1] == line_of("net = Net()")
    assert not {"given", "late"} & set(notes)


def test_whoever_gives_data_to_update_bn_is_told_so() -> None:
    import torch
    from torch.optim.swa_utils import update_bn

    def batches() -> Iterator[torch.Tensor]:
        asked.append(updates_statistics())
        yield torch.ones(4, 2)

    asked: list[bool] = []
    update_bn(batches(), torch.nn.BatchNorm1d(2))
    list(batches())
    assert asked == [True, False]


def test_the_frame_of_a_planned_call_keeps_nothing_alive(tmp_path: Path) -> None:
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})

    class Activations: ...

    def step() -> weakref.ref[Activations]:
        activations = Activations()
        PlannedCall(None, None, None, -1, False, 0, "forward", None).find_frame(recorder)
        return weakref.ref(activations)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
