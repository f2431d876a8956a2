"""Logged numbers that a framework is asked to reduce on some ranks only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, run_of, tapes

from ddpdoctor.events import Event, ReducedMetric, Site
from ddpdoctor.report.findings import Finding
from ddpdoctor.storage.call_ring import State

LOG = 60


def found(
    tmp_path: Path,
    names: Mapping[int, Sequence[str]],
    at: float = START,
    through: str = "fit",
    reducing: str = "",
) -> list[Finding]:
    """The framework reduces two numbers on every rank; rank 0 goes on, the others do not.

    Args:
        at: when the numbers are logged; reducing: what the framework reduces on the others then.
    """
    made = tapes(len(names))
    for tape in made.values():
        for _ in range(2):
            tape.call(line=20, text="trainer.fit(model)", through=through)
        op = "all_reduce" if tape.rank else "barrier"
        key = f"name = {reducing!r}" if reducing and tape.rank else ""
        tape.call(op, 20, "trainer.fit(model)", through=through, state=State.BEGUN, key=key)
    more: dict[int, list[Event]] = {
        rank: [
            Site(at=START, id=LOG, file="train.py", line=7, function="f", text="log_dict(losses)"),
            *(ReducedMetric(at=at, name=name, site=LOG) for name in logged),
        ]
        for rank, logged in names.items()
    }
    return list(CollectiveMismatch().examine(run_of(tmp_path, made, more=more, now=START + 9)))


def test_a_name_that_one_rank_does_not_log(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {0: ["loss"], 1: ["loss", "tram", "bus"], 2: ["bus", "loss"]})
    assert finding.rule == "reduced-metrics"
    assert finding.ranks == (0, 2)
    assert finding.location is not None
    assert finding.location.line == 7
    assert "rank 1 logs `tram`, to be" in (finding.cause or ""), "of `bus`, others are at fault"


@pytest.mark.parametrize(
    ("names", "more"),
    [
        ({0: ["loss", "bus"], 1: ["bus", "loss"]}, {}),
        ({0: ["loss"], 1: ["loss", "bus"]}, {"at": START + 2}),
        ({0: ["loss"], 1: ["loss", "bus"]}, {"through": ""}),
        ({0: ["loss", ""], 1: ["loss", "bus"]}, {}),
    ],
    ids=["the same", "on another way", "by the program itself", "too many names"],
)
def test_no_reason(
    tmp_path: Path, names: Mapping[int, Sequence[str]], more: Mapping[str, object]
) -> None:
    (finding,) = found(tmp_path, names, **more)  # type: ignore[arg-type]
    assert finding.rule == "unexplained"


@pytest.mark.parametrize(("reducing", "told"), [("tram", True), ("loss", False), ("what", False)])
def test_a_name_that_is_reduced_when_the_ranks_part(
    tmp_path: Path, reducing: str, told: bool
) -> None:
    """It is logged after the last call in common, as what follows from going another way may be;
    the others never log it."""
    names = {0: ["loss"], 1: ["loss", "tram"]}
    (finding,) = found(tmp_path, names, at=START + 2, reducing=reducing)
    assert (finding.rule == "reduced-metrics") is told
    assert not told or finding.ranks == (0,)
