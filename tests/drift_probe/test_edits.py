"""Edits by hand between two steps: which tensors are looked at, and which line made them."""

from __future__ import annotations

import sys
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from firing import alone

from ddpdoctor.events.amp import told_at
from ddpdoctor.probe.source.call_resolver import state_edit_in_frames
from ddpdoctor.probe.source.line_tracer import Tracer
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.watchers.gradients import gradient_clears, limits, manual_edits
from ddpdoctor.probe.watchers.gradients.gradient_sync import GradientSync
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits

NO_LINES = SimpleNamespace(user_lines=lambda frame, most: [])


def told_of(monkeypatch: pytest.MonkeyPatch, every: int, steps: int) -> list[tuple[int, bool]]:
    """The steps before which an edit of one small parameter of many began or ended."""
    parameters = [torch.nn.Parameter(torch.ones(())) for _ in range(40)]
    model: Any = SimpleNamespace(
        number=0, parameters=[weakref.ref(p) for p in parameters], inner=lambda model: None
    )
    model = type("Model", (), vars(model))()
    told: list[Any] = []
    recorder: Any = SimpleNamespace(emit=told.append, every=every, step=0, sites=NO_LINES)
    holding = SimpleNamespace(
        model=model,
        optimizer=0,
        positions=list(range(40)),
        parameters=lambda positions: [parameters[p] for p in positions],
    )
    alone(monkeypatch, ManualEdits)
    for number in range(steps):
        step: Any = SimpleNamespace(
            holdings=[holding], number=number, optimizer=lambda: None, closure=False
        )
        lifecycle.step_begins.fire(recorder, step)
        recorder.step = number + 1
        lifecycle.step_ends.fire(recorder, step)
        parameters[3].data.fill_(number)
    return [(e.step, e.changed) for e in told]


def test_every_tensor_is_looked_at_in_the_steps_that_the_user_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert told_of(monkeypatch, 1, 3) == [(1, True)]
    assert told_of(monkeypatch, 2, 4) == [(2, True), (3, False)]
    assert told_of(monkeypatch, 0, 3) == []


def test_the_line_that_edits_after_it_called_something() -> None:
    tensor = torch.ones(2)

    def inner() -> torch.Tensor:
        return tensor

    recorder: Any = SimpleNamespace(
        sites=SimpleNamespace(kind=lambda code: "user" if code.co_filename == __file__ else "")
    )
    tracer = Tracer.start(recorder, "parameters", lambda: int(tensor.sum()))
    if tracer is None:
        pytest.skip("another tracer is at work")
    inner().data.fill_(7)
    ((code, line),) = tracer.stop()
    assert code.co_name == "test_the_line_that_edits_after_it_called_something"
    with open(__file__) as text:
        assert text.readlines()[line - 1].strip() == "inner().data.fill_(7)"


@pytest.mark.parametrize("cleared", [[], [2]])
def test_a_gradient_that_is_gone_is_followed_before_others_that_changed(
    monkeypatch: pytest.MonkeyPatch, cleared: list[int]
) -> None:
    monkeypatch.setattr(manual_edits, "_clearing_sites", lambda recorder, followed: ())

    def clears(parameters: list[Any]) -> None:
        for n, parameter in enumerate(parameters):
            parameter.grad = None if n in cleared else torch.zeros(2)

    told_of_gradients(monkeypatch, clears, count=3)
    (edits,) = ManualEdits.current.models.values()
    assert edits.trace_position["gradients"] == (cleared or [0])[0]


@pytest.mark.parametrize(("left", "site"), [(0.0, 9), (0.5, -1)])
def test_the_line_that_clears_gradients_once(
    monkeypatch: pytest.MonkeyPatch, left: float, site: int
) -> None:
    """The source is searched once, for gradients that are zero or gone."""
    found = [9]
    monkeypatch.setattr(gradient_clears, "clearing_line", lambda frame, after: found.pop())
    sites = SimpleNamespace(
        user_frame=lambda frame: frame, line=lambda number, code: 3, number=lambda code, line: line
    )

    def clears(parameters: list[Any]) -> None:
        parameters[0].grad.mul_(left)

    told = told_of_gradients(monkeypatch, clears, lambda p: None, clears, count=1, sites=sites)
    assert [(e.changed, e.site) for e in told] == [(True, site), (False, -1), (True, site)]


def test_gradients_that_several_optimizers_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told of those that it holds, at its own step."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    model: Any = SimpleNamespace(
        number=0, expected=[0, 1, 2], parameters=[weakref.ref(p) for p in parameters]
    )
    model = type("Model", (), vars(model))()
    told: list[Any] = []
    recorder: Any = SimpleNamespace(emit=told.append, every=0, step=0)
    alone(monkeypatch, ManualEdits)
    monkeypatch.setattr(GradientSync.current, "averaged", lambda model: True)
    lifecycle.backward_ends.fire(recorder, SimpleNamespace(error=None, models=[model], site=-1))  # type: ignore[arg-type]
    parameters[0].grad.mul_(0.5)
    parameters[2].grad.mul_(0.25)
    for optimizer, positions in enumerate(({0}, {1}, {2})):
        holding = SimpleNamespace(model=model, optimizer=optimizer, held=frozenset(positions))
        step: Any = SimpleNamespace(holdings=[holding], number=0, closure=False)
        lifecycle.step_begins.fire(recorder, step)
    assert [(e.optimizer, e.ratio) for e in told] == [(0, 0.5), (2, 0.25)]
    assert ManualEdits.current.models[model].gradients is None


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ({1: lambda p: p.grad.zero_()}, [(True, True, 0.0)]),
        ({1: lambda p: setattr(p, "grad", torch.ones(2))}, [(True, True, 0.0)]),
        ({n: lambda p: p.grad.mul_(1.0) for n in range(20)}, []),
        ({n: lambda p: p.grad.mul_(0.5) for n in range(20)}, [(True, False, 0.5)]),
        ({}, []),
    ],
    ids=["in place", "another one", "no change", "all", "none"],
)
def test_a_write_to_one_of_many_gradients(
    monkeypatch: pytest.MonkeyPatch, writes: dict[int, Any], expected: list[Any]
) -> None:
    """It is counted, although only some values are looked at: unless those are written to, too,
    and tell that nothing changes."""
    told = told_of_gradients(monkeypatch, lambda p: [w(p[n]) for n, w in writes.items()])
    assert [(e.changed, e.counted, e.ratio) for e in told] == expected


def test_what_a_function_of_torchs_writes_is_no_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    def clips(parameters: list[Any], by_hand: bool) -> None:
        if by_hand:
            parameters[1].grad.zero_()
        ManualEdits.current._function_begins()
        for parameter in parameters:
            parameter.grad.mul_(0.5)
        ManualEdits.current._function_ends(None, ("clip_grad_norm_", 7), None, None)  # type: ignore[arg-type]

    for by_hand in (False, True):
        (event,) = told_of_gradients(monkeypatch, lambda p: clips(p, by_hand))  # noqa: B023
        assert (event.functions, event.beside) == (("clip_grad_norm_",), by_hand)


@pytest.mark.parametrize(
    ("before", "clips", "after", "besides"),
    [
        (0.5, 0.1, 1.0, 0.5),
        (1.0, 0.1, 0.5, 0.5),
        (0.5, 0.1, 0.5, 0.25),
        (0.5, 1.0, 1.0, 0.5),
        (1.0, 0.1, 1.0, 0.0),
    ],
)
def test_what_the_program_makes_of_gradients_is_told_apart_from_clipping(
    monkeypatch: pytest.MonkeyPatch, before: float, clips: float, after: float, besides: float
) -> None:
    def writing(parameters: list[Any]) -> None:
        gradients = [p.grad for p in parameters]
        for part, factor in ((gradients, before), (gradients[4:], clips), (gradients, after)):
            if part is not gradients:
                ManualEdits.current._function_begins()
            for gradient in part:
                gradient.mul_(factor)
            if part is not gradients:
                ManualEdits.current._function_ends(None, ("clip_grad_norm_", 7), None, None)  # type: ignore[arg-type]

    (event,) = told_of_gradients(monkeypatch, writing)
    assert event.besides == besides


def test_a_line_that_divides_by_the_world_size_is_the_first_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manual_edits, "_world_size", lambda file, line: "size" * (line == 2))
    code = compile("", "train.py", "exec")
    tracer: Any = SimpleNamespace(kind="gradients", stop=lambda: [(code, 1), (code, 2), (code, 3)])

    def divides(parameters: list[Any]) -> None:
        divide(parameters)
        for edits in ManualEdits.current.models.values():
            edits.tracer = tracer

    sites = SimpleNamespace(number=lambda code, line: line)
    told = told_of_gradients(monkeypatch, divides, count=1, sites=sites)
    assert [(e.site, e.more, e.divisor) for e in told] == [(2, (1, 3), "size")]


def told_of_gradients(
    monkeypatch: pytest.MonkeyPatch, *writing: Any, count: int = 20, sites: Any = None
) -> list[Any]:
    """What is told of gradients that are written to between backwards and steps."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    every = list(range(count))
    model: Any = SimpleNamespace(
        number=0, expected=every, parameters=[weakref.ref(p) for p in parameters]
    )
    model = type("Model", (), vars(model))()
    told: list[Any] = []
    recorder: Any = SimpleNamespace(emit=told.append, every=0, step=0, sites=sites)
    holding = SimpleNamespace(model=model, optimizer=0, held=frozenset(every))
    alone(monkeypatch, ManualEdits)
    monkeypatch.setattr(manual_edits, "_trace", lambda *_: None)
    monkeypatch.setattr(GradientSync.current, "averaged", lambda model: True)
    for number, writes in enumerate(writing):
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        backward: Any = SimpleNamespace(error=None, models=[model], site=-1)
        lifecycle.backward_ends.fire(recorder, backward)
        writes(parameters)
        step: Any = SimpleNamespace(holdings=[holding], number=number, closure=False)
        lifecycle.step_begins.fire(recorder, step)
    return told


def _cleared(optimizer: Any, other: Any) -> int | None:
    code = _cleared.__code__
    found = state_edit_in_frames(sys._getframe(), lambda c: c is code, optimizer)
    other.state.clear()
    optimizer.state.clear()
    return found.line - code.co_firstlineno if found else None


def _edited_twice(optimizer: Any) -> Any:
    optimizer.state[0]["momentum_buffer"].zero_()
    del optimizer.state[0]["momentum_buffer"]
    code = _edited_twice.__code__
    return state_edit_in_frames(sys._getframe(), lambda c: c is code, optimizer)


def test_the_one_line_that_edits_the_state() -> None:
    optimizer, other = (
        SimpleNamespace(state={0: {"momentum_buffer": torch.ones(1)}}) for _ in range(2)
    )
    assert _edited_twice(optimizer) is None
    assert _cleared(optimizer, other) == 4


@pytest.mark.parametrize(("told", "left"), [(300, 20), (290, 20), (7, 293)])
def test_what_is_looked_for_is_told_however_much_was_before(
    monkeypatch: pytest.MonkeyPatch, told: int, left: int
) -> None:
    """Who clips in every step has had all that is told before the reduction begins."""
    alone(monkeypatch, ManualEdits)
    model: Any = object()
    ManualEdits.current.models[model].count = told
    ManualEdits.current.look_now(model)
    assert limits.EDITS_EMITTED - ManualEdits.current.models[model].count == left


def late(
    monkeypatch: pytest.MonkeyPatch, edits_at: Any, *, line: bool = True, steps: int = 1000
) -> tuple[list[Any], list[int]]:
    """What is told of gradients that are divided before some steps, of a doctor that has spent all
    it may; and before which steps it looked after the first ones."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    inner = torch.nn.Module()
    model: Any = SimpleNamespace(
        number=0, expected=[0, 1, 2], parameters=[weakref.ref(p) for p in parameters]
    )
    model = type("Model", (), vars(model) | {"inner": lambda self: inner if line else None})()
    told: list[Any] = []
    sites = SimpleNamespace(
        kind=lambda code: "user" if code.co_filename == __file__ else "",
        number=lambda code, line: line,
        user_lines=NO_LINES.user_lines,
    )
    recorder: Any = SimpleNamespace(
        emit=told.append, every=0, step=0, sites=sites, started=time.monotonic(),
        budget_percent=1e-6, affordable=lambda: False,
    )  # fmt: skip
    holding = SimpleNamespace(
        model=model, optimizer=0, held=frozenset(range(3)), positions=[0, 1, 2],
        parameters=lambda positions: [parameters[p] for p in positions],
    )  # fmt: skip
    alone(monkeypatch, ManualEdits)
    monkeypatch.setattr(GradientSync.current, "averaged", lambda model: True)
    looks = []
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        lifecycle.backward_ends.fire(recorder, SimpleNamespace(error=None, models=[model], site=-1))  # type: ignore[arg-type]
        if (
            ManualEdits.current.models[model].gradients is not None
            and number >= limits.SNAPSHOTS_ALWAYS
        ):
            looks.append(number)
        if edits_at(number):
            divide(parameters)
        step: Any = SimpleNamespace(
            holdings=[holding], number=number, optimizer=lambda: None, closure=False, began=0.0
        )
        lifecycle.step_begins.fire(recorder, step)
        if told_at(number):
            lifecycle.step_due.fire(recorder, step)
        recorder.step += 1
        lifecycle.step_ends.fire(recorder, step)
    return told, looks


def divide(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad /= 2


@pytest.mark.parametrize("begins", [70, 301, 702])
@pytest.mark.parametrize("every", [1, 2])
def test_what_begins_late_and_lasts_is_found_whatever_the_budget(
    monkeypatch: pytest.MonkeyPatch, begins: int, every: int
) -> None:
    told, _ = late(monkeypatch, lambda n: n >= begins and (n - begins) % every == 0)
    first = next(e for e in told if e.kind == "gradients" and e.changed)
    assert begins <= first.step < begins + 120 * every
    found = next(e for e in told if e.site >= 0)
    with open(__file__) as text:
        assert text.readlines()[found.site - 1].strip() == "parameter.grad /= 2"
    if every == 1:
        assert found.step == first.step + 1


def test_looks_whatever_they_cost_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    told, looks = late(monkeypatch, lambda n: False)
    assert not told
    assert 8 <= len(looks) <= 10
    assert len({n % 4 for n in looks}) > 1, "not always the same of every few steps"


def test_a_line_that_is_not_found_is_not_looked_for_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, looks = late(monkeypatch, lambda n: n >= 100, line=False)
    assert len(looks) <= 10 + limits.TRACED_AT_MOST
