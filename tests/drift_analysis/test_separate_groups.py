"""DDP402 where DDP averages within groups of ranks only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import make_run, steps
from replicas import STEP, digests, replica

from ddpdoctor.events import (
    CallBlock,
    CallRun,
    Event,
    GroupReady,
    Hyperparameters,
    LoaderSeen,
    Signature,
    Wrapped,
)
from ddpdoctor.report.findings import Finding, Severity

GROUPS = ((0, 1), (2, 3))


def rows(group: int, *, start: int = 0, heals: bool = False) -> dict[int, list[int]]:
    own = {n: [100 * group + 10 * n + i + 1 for i in range(4)] for n in range(1, 5)}
    end = {5: [7, 7, 7, 7]} if heals else {}
    return {0: [start * group + i + 1 for i in range(4)], **own, **end}


def sent(op: str = "all_reduce", numel: int = 1, group: int = 0) -> list[Event]:
    """A call of all ranks in each step."""
    return [
        Signature(at=0, id=7, op=op, numel=numel),
        CallBlock(at=0, id=3, codes=(7, 0)),
        CallRun(at=0, group=group, first=0, block=3, repeat=4, step=0),
    ]


def findings(
    more: Sequence[Event] = (), *, start: int = 0, heals: bool = False, rate: Sequence[float] = ()
) -> list[Finding]:
    ranks = {}
    for n, mine in enumerate(GROUPS):
        for rank in mine:
            events: list[Event] = [
                GroupReady(
                    at=0, group=g, name=str(g), backend="gloo", ranks=r, member=True, site=-1
                )
                for g, r in enumerate(((0, 1, 2, 3), mine))
            ]
            for event in replica(mine):
                wrapped = isinstance(event, Wrapped)
                events.append(msgspec.structs.replace(event, group=1) if wrapped else event)
            if rate:
                group = ({"lr": rate[n]},)
                events.append(Hyperparameters(at=0, optimizer=0, step=0, groups=group))
            events += [digests("parameters", rows(n, start=start, heals=heals)), *more]
            ranks[rank] = [*events, *steps(6, site=STEP)]
    run = make_run(ranks)
    return [f for f in ParameterDrift().examine(run) if f.rule == "groups-apart"]


def test_groups_that_nothing_connects_may_be_meant() -> None:
    (finding,) = findings()
    assert finding.severity is Severity.WARNING
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.location is not None and finding.location.line == 10
    assert finding.steps is not None and finding.steps.first == 1
    assert "[0, 1], [2, 3]" in finding.cause


@pytest.mark.parametrize(
    "more",
    [
        sent("all_reduce", 1),
        sent("all_to_all_single", 4096),
        [
            LoaderSeen(
                at=0,
                loader=0,
                site=STEP,
                loop_site=STEP,
                dataset="D",
                length=8,
                sampler="S",
                replicas=4,
            )
        ],
    ],
)
def test_groups_that_work_together_are_an_error(more: list[Event]) -> None:
    (finding,) = findings(more)
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(
    "options",
    [
        {"start": 1},
        {"heals": True},
        {"rate": (0.1, 0.2)},
        {"more": sent("all_reduce", 4096)},
        {"more": sent("send", 64)},
    ],
)
def test_groups_that_train_apart_on_purpose(options: dict[str, object]) -> None:
    assert findings(**options) == []  # type: ignore[arg-type]
