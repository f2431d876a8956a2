"""Which ranks the monitor asks for the line at which they are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.monitor import late_ranks
from ddpdoctor.monitor.late_ranks import LateRanks
from ddpdoctor.storage.call_ring import ASK_LINES, Phase

CALL = (SimpleNamespace(inside=True),)


def rank(number: int, phase: Phase, since: float, calls: Any = (), step: int = 5) -> Any:
    ring = SimpleNamespace(phase=phase, progress_at=since, last_calls=calls, step=step)
    return SimpleNamespace(rank=number, pid=100 + number, ring=ring)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    found: list[int] = []

    def ask(rank: Any, question: bytes) -> None:
        assert question == ASK_LINES
        found.append(rank.rank)

    monkeypatch.setattr(late_ranks, "ask", ask)
    yield found


NOW = 100.0
WAITS = rank(1, Phase.USER, NOW - 1, CALL)


@pytest.mark.parametrize("phase", [Phase.USER, Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER])
@pytest.mark.parametrize("other", [WAITS, rank(1, Phase.BACKWARD, NOW - 1)])
def test_a_rank_that_works_while_another_waits(asked: list[int], phase: Phase, other: Any) -> None:
    LateRanks().look([rank(0, phase, NOW - 1), other], 0.0, NOW)
    assert asked == [0]


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, Phase.USER, NOW - 1)],
        [rank(0, Phase.USER, NOW - 1), rank(1, Phase.USER, NOW - 1)],
        # They have only just come there.
        [rank(0, Phase.USER, NOW - 1), rank(1, Phase.BACKWARD, NOW - 0.001)],
        [rank(0, Phase.USER, NOW - 0.001), WAITS],
        [rank(0, Phase.USER, NOW - 1, CALL), WAITS],
        [rank(0, Phase.BACKWARD, NOW - 1)],
        [rank(0, Phase.BACKWARD, NOW - 1), rank(1, Phase.USER, NOW)],
        [rank(0, Phase.LEAVING, NOW - 1), WAITS],
        # Before the first step data are read and models compiled.
        [rank(0, Phase.USER, NOW - 1, step=0), WAITS],
        [SimpleNamespace(rank=0, pid=100, ring=None), WAITS],
    ],
)
def test_nobody_is_asked(asked: list[int], ranks: list[Any]) -> None:
    LateRanks().look(ranks, 0.0, NOW)
    assert asked == []


def test_ranks_that_are_all_in_a_backward(asked: list[int]) -> None:
    """One of them may work in a hook while the others wait."""
    # What DDP reduces counts as a call from the begin of the backward on.
    LateRanks().look([rank(n, Phase.BACKWARD, NOW - 1, CALL) for n in (0, 1)], 0.0, NOW)
    assert asked == [0, 1]


def test_a_rank_is_asked_less_often_the_longer_the_run_lasts(asked: list[int]) -> None:
    monitor = LateRanks()
    for tick in range(40):  # ten seconds
        now = NOW + tick / 4
        late = [rank(0, Phase.USER, now - 1), rank(1, Phase.BACKWARD, now - 1)]
        monitor.look(late, 0.0, now)
    assert 4 <= len(asked) <= 8
