"""Collectives that are made in a helper: whoever calls it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.collective_shape_mismatch import CollectiveShapeMismatch
from ddpdoctor.checks.hang.stall import Stall
from tapes import START, run_of, stall, tapes

from ddpdoctor.storage.call_ring import State

LOOP = ((12, "for x in xs:"), (11, "if rank == 0:"))


@pytest.mark.parametrize("several", [True, False])
def test_the_call_of_a_helper_that_the_others_are_not_in(tmp_path: Path, several: bool) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 57).call("barrier", 14, caller=48 if several else 68)
    made[0].call("barrier", 14, caller=68, state=State.BEGUN, at=START + 5)
    made[1].call("DDP backward", 57, state=State.BEGUN, at=START + 5)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "unexplained"
    assert finding.location is not None
    assert finding.location.line == (68 if several else 14)
    assert (14 in [r.location.line for r in finding.related]) is several
    rows = finding.evidence["calls"]
    assert isinstance(rows, list)
    assert rows[0].get("called_from") == ("train.py:68" if several else None)


def test_a_loop_is_no_helper(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("barrier", 57).call(line=14, inside=LOOP, caller=48)
    made[0].call(line=14, inside=LOOP, caller=68, state=State.BEGUN)
    made[1].call("barrier", 57, state=State.BEGUN)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.location is not None
    assert finding.location.line == 14


def test_all_are_in_one_helper(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.call(line=14, caller=48)
        tape.call(line=14, caller=68, numel=1 + rank, state=State.BEGUN)
    (finding,) = CollectiveShapeMismatch().examine(run_of(tmp_path, made))
    assert finding.rule == "arguments"
    assert finding.location is not None
    assert finding.location.line == 14
    assert [r.location.line for r in finding.related] == [68]


@pytest.mark.parametrize(("deep", "line"), [(0, 14), (1, 48), (2, 68), (3, 68)])
def test_a_helper_that_hands_on_what_differs(tmp_path: Path, deep: int, line: int) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.call(line=14, caller=(48, 68), hands_on=deep, numel=1 + rank, state=State.BEGUN)
    (finding,) = CollectiveShapeMismatch().examine(run_of(tmp_path, made))
    assert finding.rule == "arguments"
    assert finding.location is not None
    assert finding.location.line == line
    assert [r.location.line for r in finding.related][:1] == [14] * bool(deep)


def test_a_helper_by_way_of_one_that_hands_on(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 57).call(line=14, caller=(48, 68), hands_on=2)
    made[0].call(line=14, caller=(48, 58), hands_on=2, state=State.BEGUN)
    made[1].call("DDP backward", 57, state=State.BEGUN)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made))
    assert finding.rule == "unexplained"
    assert finding.location is not None
    assert finding.location.line == 58


@pytest.mark.parametrize(
    ("branch", "others", "line"),
    [
        ("if self.rank == 0:", None, 48),
        ("past if self.rank: return", None, 48),
        ("if self.late:", None, 48),
        ("if self.late:", 58, 68),
        ("if self.late:", 68, 48),
        ("if dist.is_initialized():", None, 68),
    ],
)
def test_a_branch_in_a_helper(tmp_path: Path, branch: str, others: int | None, line: int) -> None:
    """The caller of it is pointed at only where the others enter that branch from elsewhere."""
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 57)
        if others:
            tape.call(line=14, caller=(48, others), hands_on=2, branches={48: branch})
    made[0].call(line=14, caller=(48, 68), hands_on=2, branches={48: branch}, state=State.BEGUN)
    made[1].call("DDP backward", 57, state=State.BEGUN)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made))
    assert finding.location is not None
    assert finding.location.line == line
    assert finding.rule == ("branch" if "rank" in branch else "unexplained")


def test_a_branch_on_the_rank_around_the_call_of_a_helper(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 57)
    branches = {48: "if step % 10 == 0:", 68: "if rank == 0:"}
    made[0].call(line=14, caller=(48, 68), hands_on=2, branches=branches, state=State.BEGUN)
    made[1].call("DDP backward", 57, state=State.BEGUN)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.location is not None
    assert finding.location.line == 68
    assert 67 in [r.location.line for r in finding.related]


def test_a_stall_names_the_caller(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=14, caller=48).call(line=14, caller=68, state=State.BEGUN, at=START + 5)
    seen = {0: [stall(START + 30, START + 5)]}
    (finding,) = Stall().examine(run_of(tmp_path, made, nodes=seen))
    assert finding.rule == "same-collective"
