"""DDP601 of ranks that wait for each other in different groups, one of them beyond a loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, CallLog, run_of, tapes

from ddpdoctor.events import Statement, Way
from ddpdoctor.report.findings import Finding
from ddpdoctor.storage.call_ring import State

ACT = Statement(8, "for it in range(n):", exits=(Way(11, "if self.solved:", 13, 14),))
ROUNDS = (6, "for round in range(rounds):")


def found(tmp_path: Path, made: dict[int, CallLog]) -> Finding:
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, now=START + 7))
    return finding


def actors(
    world: int, gone: tuple[int, ...], *around: tuple[int, str], anew: bool = False
) -> dict[int, CallLog]:
    """All but rank 0 are in a loop, which some left; `anew`: the others were out of it, too."""
    made = tapes(world)
    made[0].call("barrier", 20, inside=around, state=State.BEGUN, at=START + 5)
    for rank in range(1, world):
        tape = made[rank].group(1, "1", tuple(range(1, world)))
        tape.call(line=9, group=1, inside=(ACT, *around)).call(
            line=9, group=1, inside=(ACT, *around)
        )
        if anew:
            tape.group(2, "2", tuple(range(1, world))).call(line=15, group=2)
        if rank in gone:
            tape.call("barrier", 20, inside=around, state=State.BEGUN, at=START + 5)
        else:
            inside = (ACT, *around)
            tape.call(line=9, group=1, inside=inside, state=State.BEGUN, at=START + 5)
    return made


@pytest.mark.parametrize(("gone", "ranks"), [((2,), (2,)), ((2, 3), (1,)), ((1, 3), (2,))])
def test_a_loop_that_one_rank_of_its_group_left(
    tmp_path: Path, gone: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    finding = found(tmp_path, actors(4, gone))
    assert finding.rule == "loop-exit"
    assert finding.ranks == ranks
    assert str(finding.location) == "train.py:8"
    assert [r.location.line for r in finding.related] == [11, 9, 20]
    assert finding.deadlocked


def test_too_early_on_the_one_or_too_late_on_the_other(tmp_path: Path) -> None:
    assert found(tmp_path, actors(3, (2,))).ranks == (1, 2)


def test_the_others_may_have_come_to_it_again(tmp_path: Path) -> None:
    """By another round of a loop around both, without the call after it, or from elsewhere."""
    for n, made in enumerate((actors(4, (2,), ROUNDS), actors(4, (2,), anew=True))):
        finding = found(tmp_path / str(n), made)
        assert finding.rule == "group-order"
        assert finding.ranks == (0, 1, 2, 3)
