"""Wrapped models that take part in a backward on some ranks only."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, CallLog, run_of, tapes
from wraps import parameters

from ddpdoctor.events import Event, ForwardInput, Site, Wrapped
from ddpdoctor.report.findings import Finding
from ddpdoctor.storage.call_ring import State

BOTH: dict[str, object] = {"models": (0, 1)}
ONE: dict[str, object] = {"model": 0}
UNKNOWN: dict[str, object] = {}
RUN_AT = 60


def found(
    tmp_path: Path, made: dict[int, CallLog], ran: int = RUN_AT, **wrap: object
) -> list[Finding]:
    fields = {"wrapper": "DistributedDataParallel", "group": 0, "site": -1, **wrap}
    ran_at = ForwardInput(
        at=START, model=1, forward=0, site=ran, digest=0, numbers=1, rows=1, fed=False
    )
    more: dict[int, list[Event]] = {
        rank: [
            Site(at=START, id=RUN_AT, file="train.py", line=7, function="f", text="b = second(x)"),
            *(
                Wrapped(at=START, model=n, kind="Net", parameters=parameters(), **fields)  # type: ignore[arg-type]
                for n in range(2)
            ),
            ran_at,
        ]
        for rank in made
    }
    return list(CollectiveMismatch().examine(run_of(tmp_path, made, more=more, now=START + 9)))


def backwards(
    *last: dict[str, object], before: dict[str, object] = BOTH, line: int = 21
) -> dict[int, CallLog]:
    """Three steps in which a line runs a backward of the same models on all ranks, and one more."""
    made = tapes(len(last))
    for tape, models in zip(made.values(), last, strict=True):
        for step in range(3):
            tape.call("DDP backward", 21, text="loss.backward()", step=step, **before)  # type: ignore[arg-type]
        state = State.BEGUN
        tape.call("DDP backward", line, text="loss.backward()", step=3, state=state, **models)  # type: ignore[arg-type]
    return made


def test_a_model_that_one_rank_leaves_out(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, backwards(BOTH, BOTH, ONE))
    assert finding.rule == "model-left-out"
    assert finding.ranks == (2,)
    assert finding.location is not None
    assert finding.location.line == 7
    assert [r.location.line for r in finding.related] == [21]
    assert "Net` (wrapped as number 2 of 2" in finding.summary
    assert "ranks 0-1 run it" in finding.summary


def test_without_the_line_of_its_forward(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, backwards(BOTH, ONE), ran=-1)
    assert finding.location is not None
    assert finding.location.line == 21


def test_the_first_backward_of_all(tmp_path: Path) -> None:
    made = tapes()
    for tape, models in zip(made.values(), (BOTH, ONE), strict=True):
        tape.call("DDP backward", 21, text="loss.backward()", **models)  # type: ignore[arg-type]
    (finding,) = found(tmp_path, made)
    assert (finding.rule, finding.ranks) == ("model-left-out", (1,))


@pytest.mark.parametrize("before", [BOTH, ONE, UNKNOWN], ids=["usual", "never", "unknown"])
def test_others_are_in_its_forward(tmp_path: Path, before: dict[str, object]) -> None:
    made = backwards(ONE, ONE, before=before)
    forward = tapes()[0]
    for step in range(3):
        forward.call("DDP backward", 21, text="loss.backward()", step=step, **before)  # type: ignore[arg-type]
    forward.call("DDP forward", 8, text="b = second(x)", step=3, state=State.BEGUN, model=1)
    made[0] = forward
    (finding,) = found(tmp_path, made)
    if before is not BOTH:
        assert finding.rule == "unexplained", "the rank may be elsewhere in its step"
        return
    assert (finding.rule, finding.ranks) == ("model-left-out", (1,))
    assert finding.location is not None
    assert finding.location.line == 8


@pytest.mark.parametrize(
    ("last", "wrap"),
    [
        ((BOTH, BOTH), {}),
        ((BOTH, UNKNOWN), {}),
        ((BOTH, ONE), {"adopted": True}),
        ((BOTH, ONE), {"options": {"init_sync": False}}),
    ],
    ids=["the same", "unknown", "not counted from the first on", "numbers of its own"],
)
def test_nothing_is_known_to_differ(
    tmp_path: Path, last: tuple[dict[str, object], ...], wrap: dict[str, object]
) -> None:
    assert not found(tmp_path, backwards(*last), **wrap)
