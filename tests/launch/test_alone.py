"""Ranks without a group: what shows that they have another way to each other, and what does not."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.collectives.sync_points import SyncPoints
from ddpdoctor.probe.training import optimizers
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.process import no_process_group
from ddpdoctor.probe.watchers.process.no_process_group import NoProcessGroup

Between = Callable[[Any, int], object]


def nothing(model: Any, step: int) -> None:
    pass


def average(model: Any, step: int) -> None:
    """What a socket, a file or a store brought."""
    if step == 3:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_((p + torch.randn_like(p)) / 2)


def average_data(model: Any, step: int) -> None:
    for p in model.parameters() if step == 3 else ():
        p.data.copy_((p + torch.randn_like(p)) / 2)


def swap_and_back(model: Any, step: int) -> None:
    kept = {n: v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict({n: torch.zeros_like(v) for n, v in kept.items()})
    model.load_state_dict(kept)


def mean_gradient(model: Any, step: int) -> None:
    for p in model.parameters():
        p.grad = (p.grad + torch.randn_like(p)) / 2


def clip(model: Any, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def freeze_a_layer(model: Any, step: int) -> None:
    model[0].weight.grad.zero_()
    model[0].bias.grad = None


def seen(
    monkeypatch: pytest.MonkeyPatch, after: Between = nothing, before: Between = nothing
) -> list[tuple[str, ...]]:
    """The layers told of, of a loop with something after each step, or before it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(no_process_group, "OTHER_LAYERS", ())
    monkeypatch.setattr(
        NoProcessGroup.current, "_following", SimpleNamespace(enable=lambda awake: None)
    )
    monkeypatch.setattr(NoProcessGroup, "current", NoProcessGroup())
    monkeypatch.setattr(SyncPoints, "current", SyncPoints())
    told: list[Any] = []
    recorder: Any = SimpleNamespace(
        step=0, affordable=lambda: True, emit=lambda event, vital: told.append(event)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    known: Any = SimpleNamespace(reference=weakref.ref(optimizer), step=None)
    for number in range(6):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).pow(2).mean().backward()
        NoProcessGroup.current._backward_ends(recorder, None)  # type: ignore[arg-type]
        before(model, number)
        step: Any = SimpleNamespace(optimizer=known.reference, known=known, site=1, closure=False)
        step.due = True
        known.step = step
        NoProcessGroup.current._step_begins(recorder, step)
        NoProcessGroup.current._step_due(recorder, step)
        optimizer.step()
        NoProcessGroup.current._step_ends(recorder, step)
        recorder.step += 1
        after(model, number)
    NoProcessGroup.current._leaving(recorder, None)
    assert not told[0].layers
    return [event.layers for event in told[1:]]


@pytest.mark.parametrize("after", [nothing, swap_and_back])
def test_trains_alone(monkeypatch: pytest.MonkeyPatch, after: Between) -> None:
    assert not seen(monkeypatch, after)


@pytest.mark.parametrize("before", [clip, freeze_a_layer])
def test_a_gradient_times_a_number_is_from_nobody_else(
    monkeypatch: pytest.MonkeyPatch, before: Between
) -> None:
    assert not seen(monkeypatch, before=before)


@pytest.mark.parametrize("after", [average, average_data])
def test_parameters_that_somebody_sent(monkeypatch: pytest.MonkeyPatch, after: Between) -> None:
    assert seen(monkeypatch, after) == [(no_process_group.PARAMETERS,)]


def test_gradients_that_somebody_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (no_process_group.GRADIENTS,) in seen(monkeypatch, before=mean_gradient)


def test_a_store_that_is_waited_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(model: Any, step: int) -> None:
        if step == 5:
            SyncPoints.current.stored_at = time.monotonic()

    assert seen(monkeypatch, wait) == [(no_process_group.STORE,)]


def test_shared_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, lambda model, step: model.share_memory()) == [
        (no_process_group.SHARED,)
    ]


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "DDPDOCTOR_DIR": "runs"}, [(1, 2, None)]),
        ({"RANK": "0", "WORLD_SIZE": "1", "DDPDOCTOR_DIR": "runs"}, []),
        ({"WORLD_SIZE": "2", "DDPDOCTOR_DIR": "runs"}, []),
        ({"RANK": "1", "WORLD_SIZE": "2"}, []),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "DDPDOCTOR_DIR": "runs", "DDPDOCTOR_OWNER": "7"},
            [],  # a helper of a rank
        ),
    ],
)
def test_its_first_step_makes_a_process_a_rank_that_says_so(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: list[object]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "DDPDOCTOR_DIR", "DDPDOCTOR_OWNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Optimizers.current, "_first_step", [])
    monkeypatch.setattr(optimizers.current, "recorder", None)
    asked: list[object] = []
    NoProcessGroup.current.activate_with(lambda *given: asked.append(given))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        Optimizers.current._pre_hook(None, (), {})
    assert asked == rank
