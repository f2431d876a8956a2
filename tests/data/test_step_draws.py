"""DDP510 where training steps draw from torch's generator, in the same state on all ranks."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.data.identical_augmentation import IdenticalAugmentation
from recordings import make_run, site

from ddpdoctor.events import Event, StepDraws
from ddpdoctor.report.findings import Finding, Severity

FORWARD = site(1, "train.py", 12, "loss = model(actions)")


def judged(*states: tuple[int, int], dropout: bool = False) -> list[Finding]:
    """What is found where rank r drew from `states[step][r]` in each step."""
    ranks: dict[int, list[Event]] = {0: [FORWARD], 1: [FORWARD]}
    for n, state in enumerate(states):
        for rank, before in enumerate(state):
            ranks[rank].append(
                StepDraws(
                    at=0, model=0, step=1 << n, before=before, after=before + 1, dropout=dropout,
                    site=1,
                )
            )  # fmt: skip
    return [
        f for f in IdenticalAugmentation().examine(make_run(ranks)) if f.rule == "equal-step-draws"
    ]


def test_equal_noise_is_a_note() -> None:
    (finding,) = judged((5, 5), (7, 7), (9, 9))
    assert (finding.severity, finding.ranks) == (Severity.NOTE, (0, 1))
    assert finding.location is not None and finding.location.line == 12
    assert finding.steps is not None and finding.steps.first == 1


@pytest.mark.parametrize(
    ("states", "dropout"),
    [
        ([(5, 6), (7, 8)], False),
        ([(5, 5), (7, 8)], False),
        ([(5, 5)], False),
        ([(5, 5), (7, 7)], True),
    ],
)
def test_other_draws_are_not(states: list[tuple[int, int]], dropout: bool) -> None:
    assert judged(*states, dropout=dropout) == []
