"""What comes at every k-th round of a loop, and is left out by one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, CallLog, run_of

from ddpdoctor.storage.call_ring import State


@pytest.mark.parametrize(
    ("skew", "around", "told"),
    [
        (0, "for step in range(200):", True),
        (1, "for step in range(200):", False),
        (0, "if step % 3 == 0:", False),
    ],
)
def test_a_call_of_every_third_round_that_a_rank_left_out(
    tmp_path: Path, skew: int, around: str, told: bool
) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    loop = (8, "for step in range(200):")
    for tape in made.values():
        for n in range(4):
            tape.call(line=16, inside=((13, "if step % 3 == 0:"), (8, around)), numel=1)
            for _ in range(3 + skew * (n == 2)):
                tape.call("DDP backward", 12, inside=(loop,))
    inside = ((13, "if step % 3 == 0:"), (8, around))
    made[0].call(line=16, inside=inside, numel=1, state=State.BEGUN, at=START + 5)
    made[1].call("DDP backward", 12, inside=(loop,), state=State.BEGUN, at=START + 5)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, now=START + 7))
    if told:
        assert finding.ranks == (1,)
        assert str(finding.location) == "train.py:16"


def test_a_call_that_is_due_for_one_rank_only(tmp_path: Path) -> None:
    """Both made it in the first round; then each has a period of its own."""
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    loop, inside = (8, "for step in range(200):"), ((13, "if step % every == 0:"),)
    for tape in made.values():
        tape.call("DDP backward", 12, inside=(loop,), step=0)
        tape.call(line=16, inside=(*inside, loop), numel=1, step=1)
        for step in range(1, 5):
            tape.call("DDP backward", 12, inside=(loop,), step=step)
    made[0].call("DDP backward", 12, inside=(loop,), step=5, state=State.BEGUN, at=START + 5)
    made[1].call(line=16, inside=(*inside, loop), numel=1, step=5, state=State.BEGUN, at=START + 5)
    (finding,) = CollectiveMismatch().examine(run_of(tmp_path, made, now=START + 7))
    assert (finding.rule, finding.ranks) == ("branch", (1,))
    assert str(finding.location) == "train.py:16"
