"""Writes to parameters beside the optimizer's: how torch counts them, what DDP402 says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from replicas import digests, run_of

from ddpdoctor.events import Edited, Rewritten
from ddpdoctor.events.pack import pack, unpack
from ddpdoctor.report.findings import Finding, Severity, Steps


def told(edits: dict[int, Any], looks: list[int], decay_from: int = 1000) -> list[Any]:
    """What is told of two parameters that an optimizer steps, edited before some steps; with
    weight decay it writes twice per step."""
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training import write_counts

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    holding: Any = SimpleNamespace(
        model=SimpleNamespace(number=0),
        optimizer=0,
        positions=[3, 7],
        parameters=lambda positions: parameters,
    )
    seen: list[Any] = []
    known, recorder = write_counts.WriteCounts(), SimpleNamespace(emit=seen.append)
    for step in range(max(looks) + 1):
        with torch.no_grad():
            edits.get(step, lambda each: None)(parameters)
            if step in looks:
                write_counts.record_writes(recorder, holding, known, step)  # type: ignore[arg-type]
            for parameter in parameters:
                for _ in range(1 + (step >= decay_from)):
                    parameter.add_(1)
    return [(e.since, e.step, e.times, unpack(e.parameters)) for e in seen]


EARLY = [0, 1, 2, 3, 4]


def test_a_write_that_is_no_step_of_the_optimizer() -> None:
    assert told({}, [*EARLY, 8, 16, 32]) == []
    assert told({11: lambda both: both[1].mul_(2)}, [*EARLY, 8, 16, 32]) == [(8, 16, 1, [7])]
    assert told({3: lambda both: both[0].zero_()}, EARLY) == [(2, 3, 1, [3])]


def test_an_optimizer_that_writes_more_often_from_some_step_on() -> None:
    assert told({}, [*EARLY, 8, 16, 24, 32, 40], decay_from=16) == []


def told_at_the_end(*written: tuple[int, Rewritten], apart: int = 3) -> list[Finding]:
    """Three ranks of which one ends with another head than the others, equal at step 2 of 8."""
    ranks: dict[int, list[Any]] = {n: [] for n in range(3)}
    for number, event in written:
        ranks[number].append(event)
    for number, events in ranks.items():
        events.append(digests("parameters", {n: [1, 2, 3, 4 + n] for n in range(3)}))
        end = {8: [1, 2, 3, 9 + (number == 1)]}
        events.append(digests("parameters", end, point="end"))
    return list(ParameterDrift().examine(run_of(ranks, count=8)))


def write(since: int, step: int, times: int = 1, position: int = 3) -> Rewritten:
    return Rewritten(
        at=0, model=0, optimizer=0, since=since, step=step, times=times, parameters=pack([position])
    )


def test_a_rank_that_wrote_to_it_and_trained_on() -> None:
    (finding,) = told_at_the_end((1, write(4, 6)))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (1,))
    assert finding.rule == "write-on-some-ranks"
    assert finding.steps == Steps(6, 7, 2)


def test_written_after_the_last_look_it_may_be_after_the_last_step() -> None:
    (finding,) = told_at_the_end((1, write(6, 8)))
    assert (finding.severity, finding.ranks) == (Severity.NOTE, (1,))


@pytest.mark.parametrize(
    "events",
    [
        [(n, write(4, 6)) for n in range(3)],
        [(0, write(4, 6))],
        [(1, write(0, 2))],
        [(1, write(4, 6, position=0))],
        [(1, write(4, 6)), (0, write(2, 4)), (2, write(1, 7))],
    ],
    ids=["all", "another rank", "before they were equal", "another parameter", "other looks"],
)
def test_writes_that_explain_nothing(events: list[tuple[int, Rewritten]]) -> None:
    (finding,) = told_at_the_end(*events)
    assert (finding.rule, finding.severity) == ("unknown-cause", Severity.NOTE)


def test_values_that_are_not_what_the_last_step_left() -> None:
    edit = Edited(at=0, model=0, optimizer=0, kind="parameters", step=8, changed=True)
    (finding,) = told_at_the_end((1, edit))  # type: ignore[arg-type]
    assert (finding.severity, finding.ranks) == (Severity.NOTE, (1,))
