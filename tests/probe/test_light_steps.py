"""Which steps are light follows from what the doctor takes, and is the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events.drift import full
from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.recording.hooks import Hook, Light
from ddpdoctor.probe.recording.limits import FIRST_STEPS
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.training.light_steps import LightSteps

STEP_NS, LAST = 10_000_000, 2000
NEVER = 1 << 40


@pytest.fixture(autouse=True)
def no_watchers() -> Iterator[None]:
    hooks.forget()
    yield
    hooks.forget()


def examined(
    examined_ns: int, light_ns: int, *, every: int = 0, next_examined: int = NEVER
) -> list[int]:
    """The steps that are not light, of a run whose steps cost the doctor so much."""
    recorder: Any = SimpleNamespace(own_ns=0, every=every, budget_percent=1.0)
    model = SimpleNamespace(next_examined=next_examined, synced_backwards=0)
    plan: Any = SimpleNamespace(model=model, syncs=1, examined=lambda: False)
    decides, light, found = LightSteps(), 0, []
    for step in range(LAST):
        recorder.own_ns += light_ns if light else examined_ns
        model.synced_backwards += 1
        if not light:
            found.append(step)
        light -= light > 0
        if not light:
            light = decides.after(recorder, plan, step, step * STEP_NS / 1e9)
    return found


def test_none_within_the_budget() -> None:
    assert examined(90_000, 10_000) == list(range(LAST))


def test_as_many_as_the_budget_asks_for() -> None:
    late = [step for step in examined(200_000, 20_000) if step >= LAST // 2]
    share = len(late) / (LAST // 2)
    assert share * 200_000 + (1 - share) * 20_000 <= 1.1 * STEP_NS / 100
    assert share > 0.2, "no fewer examined than that"


def test_the_first_steps_and_full_ones_are_examined() -> None:
    found = examined(1_000_000, 500_000)
    assert found[: FIRST_STEPS + 1] == list(range(FIRST_STEPS + 1))
    assert set(filter(full, range(LAST))) <= set(found)
    assert len(found) < LAST / 2


def test_ranks_with_other_costs_have_steps_in_common() -> None:
    dear, cheap = examined(1_000_000, 500_000), examined(200_000, 20_000)
    assert len(dear) < len(cheap)
    late = {step for step in dear if step >= LAST // 2}
    assert late and late <= set(cheap)


def test_backwards_that_are_examined_whole_are_not_light() -> None:
    assert 1499 in examined(1_000_000, 500_000, next_examined=1499)
    assert 1499 not in examined(1_000_000, 500_000)


def test_none_where_the_user_chooses() -> None:
    assert examined(1_000_000, 500_000, every=1) == list(range(LAST))


def test_none_while_a_watcher_wants_every_step() -> None:
    wants = lifecycle.backward_ends.subscribe(lambda *of: None, enabled=False)
    assert len(examined(1_000_000, 500_000)) < LAST / 2
    wants.enable()
    assert examined(1_000_000, 500_000) == list(range(LAST))


def test_who_is_called_in_light_steps() -> None:
    moment: Hook[str] = Hook("moment")
    called: list[str] = []
    every = moment.subscribe(lambda *of: called.append("every"), enabled=False)
    moment.subscribe(lambda *of: called.append("left out"), light=Light.LEFT_OUT)
    moment.subscribe(lambda *of: called.append("light"), light=Light.CALLED)
    recorder: Any = None
    moment.fire_fast(recorder, "", 1)
    assert called == ["light"]
    every.enable()
    moment.fire_fast(recorder, "", 1)
    assert called[1:] == ["every", "left out", "light"]
