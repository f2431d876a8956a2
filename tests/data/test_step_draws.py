"""DDP510 where training steps draw from torch's generator, in the same state on all ranks."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.data.identical_augmentation import IdenticalAugmentation
from recordings import make_run, site

from ddpdoctor.events import Event, Seeded, StepDraws
from ddpdoctor.report.findings import Finding, Severity

FORWARD = site(1, "train.py", 12, "loss = model(actions)")
SEED = site(2, "train.py", 5, "seed_everything(7)")
AGAIN = site(3, "train.py", 11, "trainer.fit(model)")


def seeded(seed: int, line: int = 2, *, by: str = "", generator: str = "torch") -> Seeded:
    return Seeded(at=0, generator=generator, seed=str(seed), site=line, by=by)


def judged(
    *states: tuple[int, int],
    dropout: bool = False,
    seeds: tuple[list[Seeded], list[Seeded]] = ([], []),
) -> list[Finding]:
    """What is found where rank r drew from `states[step][r]` in each step."""
    ranks: dict[int, list[Event]] = {r: [FORWARD, SEED, AGAIN, *seeds[r]] for r in (0, 1)}
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


@pytest.mark.parametrize(
    ("first", "second", "line", "fix"),
    [
        ([seeded(7)], [seeded(7)], 5, "`torch.manual_seed(7 + rank)` right before training"),
        ([seeded(7), seeded(7, 3)], [seeded(7), seeded(7, 3)], 5, "`torch.manual_seed(7 + rank)`"),
        ([seeded(1), seeded(7, 3)], [seeded(1), seeded(7, 3)], 11, "train.py:11"),
        ([seeded(7, by="lightning.fabric.utilities.seed")] * 2, [seeded(7)], 5, "`on_train_start`"),
        ([seeded(7)], [seeded(8)], None, "after the model is built"),
        ([seeded(7)], [], None, "after the model is built"),
        ([seeded(7, generator="numpy")], [seeded(7)], None, "after the model is built"),
    ],
)
def test_the_line_that_seeds_all_ranks_alike(
    first: list[Seeded], second: list[Seeded], line: int | None, fix: str
) -> None:
    (finding,) = judged((5, 5), (7, 7), seeds=(first, second))
    assert [r.location.line for r in finding.related] == [line] * (line is not None)
    assert fix in finding.fix


def test_a_state_that_every_rank_restores() -> None:
    """Also of a model with dropout: that it is the same state is no choice of a seed."""
    restored = Seeded(at=0, generator="torch", seed="99", site=3, restored=True)
    calls = [seeded(7), restored], [seeded(8), restored]
    (finding,) = judged((5, 5), (7, 7), seeds=calls, dropout=True)
    assert [r.location.line for r in finding.related] == [11]
    assert "every rank restores the same state" in finding.cause
    assert "restore each rank's own at train.py:11" in finding.fix
