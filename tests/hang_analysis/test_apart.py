"""DDP601 where a rank skipped a round, and a call that comes in some rounds only shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, run_of, tapes

from ddpdoctor.events import Event, ExceptionPassed, Statement, Way
from ddpdoctor.report.findings import Finding
from ddpdoctor.storage.call_ring import State

HEAD = "for i in range(40):"
TURN = "if i % 10 == 9:"
SKIPS = Way(line=22, text="except ValueError:", first=17, last=27)
TRIED = Statement(line=16, text="try:", ways=(SKIPS,))


def found(
    tmp_path: Path,
    *,
    head: str = HEAD,
    turn: str = TURN,
    way: Way = SKIPS,
    within: Sequence[Statement | tuple[int, str]] = (),
    around: Sequence[tuple[int, str]] = (),
    more: dict[int, list[Event]] | None = None,
) -> Finding:
    """Rank 1 comes to the call of every tenth round first; the others are in that of all."""
    made = tapes(3)
    loop = (Statement(line=15, text=head, ways=(way,)), *around)
    for tape in made.values():
        for _ in range(4):
            tape.call("DDP backward", 20, inside=(*within, TRIED, *loop))
    for rank, tape in made.items():
        if rank == 1:
            inside = ((25, turn), *loop) if turn else loop
            tape.call(line=27, inside=inside, state=State.BEGUN, at=START + 5)
        else:
            tape.call("DDP backward", 20, inside=(*within, TRIED, *loop),
                      state=State.BEGUN, at=START + 5)  # fmt: skip
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, more=more, now=START + 7))
    return finding


def test_some_skipped_a_round(tmp_path: Path) -> None:
    finding = found(tmp_path)
    assert finding.rule == "skipped-round"
    assert finding.ranks == (0, 1, 2)
    assert finding.location is not None and finding.location.line == 22


@pytest.mark.parametrize(
    ("who", "ranks"),
    [((1,), (1,)), ((0, 2), (0, 2)), ((0,), (0, 1, 2)), ((0, 1, 2), (0, 1, 2))],
)
def test_who_skipped_it_by_what_it_caught(
    tmp_path: Path, who: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    bad = ExceptionPassed(at=START + 2, where="forward", kind="ValueError", message="x", step=3)
    finding = found(tmp_path, more={rank: [bad] if rank in who else [] for rank in range(3)})
    assert finding.rule == "skipped-round"
    assert finding.ranks == ranks


@pytest.mark.parametrize(
    "turn",
    ["if (i + 1) % args.every == 0:", "if i % every == every - 1 and i > 5:", "if not i % 2:"],
)
def test_branches_that_go_by_the_round(tmp_path: Path, turn: str) -> None:
    assert found(tmp_path, turn=turn).rule == "skipped-round"


@pytest.mark.parametrize(
    "head", ["for i, batch in enumerate(loader):", "for i, (x, y) in enumerate(train.loader):"]
)
def test_rounds_that_are_numbered(tmp_path: Path, head: str) -> None:
    epochs = ((14, "for epoch in range(n):"),)
    assert found(tmp_path / "one", head=head).rule == "skipped-round"
    assert found(tmp_path / "more", head=head, around=epochs).rule != "skipped-round"


@pytest.mark.parametrize(
    "unlike",
    [
        {"turn": "if loss > 3 and i % 10 == 9:"},
        {"turn": "if i > 9:"},
        {"turn": "if i % 4 == mine:"},
        {"way": Way(line=22, text="if i < 5:", first=17, last=27)},
        {"turn": "if step % 10 == 9:"},
        {"turn": "if i % 10 == 9 and rank == 1:"},
        {"turn": ""},
        {"head": "for i in range(start, 40):"},
        {"head": "for i, x in enumerate(loader, start=first):"},
        {"head": "while i < 40:"},
        {"way": Way(line=22, text="except ValueError:", first=17, last=21)},
        {"way": Way(line=23, text="if skip:", first=24, last=27)},
        {"within": ((19, "if torch.isfinite(loss):"),)},
        {"within": (Statement(line=18, text="past if bad(loss):", opener=17),)},
        {"within": ((19, "for part in parts:"),)},
        {"within": (Statement(line=19, text="try:",
                              ways=(Way(line=21, text="except OSError:", first=20, last=20),)),)},
    ],
)  # fmt: skip
def test_it_may_be_in_the_same_round(tmp_path: Path, unlike: dict[str, object]) -> None:
    assert found(tmp_path, **unlike).rule != "skipped-round"  # type: ignore[arg-type]


BAD = Way(line=19, text="if not torch.isfinite(loss):", first=20, last=27)


@pytest.mark.parametrize(
    ("way", "inner", "rule"),
    [
        (BAD, (), "skipped-round"),
        (Way(line=16, text="if bad(batch):", first=17, last=27), (), "unexplained"),
        (BAD, ((16, "for part in parts:"),), "loop-exit"),  # other rounds of an inner loop
    ],
    ids=["after the forward", "before it", "inner loop"],
)
def test_the_next_round_begins_while_others_are_in_this_one(
    tmp_path: Path, way: Way, inner: Sequence[tuple[int, str]], rule: str
) -> None:
    """The forward of the next round takes the place of a backward, as with BatchNorm."""
    made = tapes(2)
    loop = (Statement(line=15, text="for batch in loader:", ways=(way,)),)
    for rank, tape in made.items():
        tape.call("DDP forward", 18, inside=(*inner, *loop)).call("DDP backward", 21, inside=loop)
        tape.call("DDP forward", 18, inside=(*inner, *loop))
        again = {"op": "DDP forward", "line": 18, "inside": (*inner, *loop)}
        went_on = {"op": "DDP backward", "line": 21, "inside": loop}
        tape.call(**(went_on if rank else again), state=State.BEGUN, at=START + 5)  # type: ignore[arg-type]
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == rule
    if rule == "skipped-round":
        assert finding.ranks == (0,)
        assert finding.location is not None and finding.location.line == 19
        assert "skip on all ranks or on none" in finding.fix
