"""How much the objects hold that a program gathers."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from ddpdoctor.events import Event, ObjectsGathered
from ddpdoctor.probe.collectives import gathered_results
from ddpdoctor.probe.collectives.gathered_results import GatheredResults

Sums = namedtuple("Sums", "correct count")


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (0.5, 1),
        ({"correct": 5, "count": 11}, 3),
        (Sums(5, torch.tensor(11)), 3),
        ([0.1] * 11, 12),
        (torch.zeros(11, 3), 33),
        ({index: [] for index in range(11)}, 12),
        ({"labels": [torch.zeros(4), torch.zeros(4), torch.zeros(3)]}, 13),
        ("0110", 4),
        ([1] * 50_000, gathered_results.ENDLESS),
        (object(), gathered_results.ENDLESS),
    ],
)
def test_entries(value: Any, entries: int) -> None:
    assert gathered_results.entries(value) == entries


def test_what_holds_itself() -> None:
    value: list[Any] = []
    value.append(value)
    assert gathered_results.entries(value) == gathered_results.ENDLESS


def test_only_what_is_larger_than_before_is_recorded() -> None:
    class Recorder:
        events: list[Event] = []

        def emit(self, event: Event, *, vital: bool) -> None:
            self.events.append(event)

    GatheredResults.begin()
    recorder: Any = Recorder()
    for size in (5, 7, 6, 20, -1):
        GatheredResults.current.record_object(recorder, 2 if size > 0 else -1, [0] * abs(size))
    told = [e.entries for e in recorder.events if isinstance(e, ObjectsGathered)]
    assert told == [7, 15, 31]
