"""DDP601 where a branch or an exception that was caught parts the ranks, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from tapes import START, CallLog, run_of, tapes

from ddpdoctor.events import Statement, Way
from ddpdoctor.probe.source import statements
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

LOOP = (5, "for i in range(50):")


def found(run: Run) -> list[Finding]:
    return list(CollectiveMismatch().examine(run))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("acc = validate(model, args) if rank == 0 else 0.0", ["if rank == 0"]),
        ("src = best_rank(x) if r != 1 else r - 1", ["if r != 1"]),
        ("acc = 0.0 if rank else validate(model)", ["if not rank"]),
        ("acc = 0.0 if rank > 0 else validate(model)", ["if not (rank > 0)"]),
        ("dist.get_rank() == 0 and dist.barrier()", ["if dist.get_rank() == 0"]),
        ("is_main() or dist.barrier()", ["if not is_main()"]),
        ("print(evaluate(m) if r == 0 else None)", ["if r == 0"]),
        ("return f(x) if a else g(x) if b else None", []),
        ("return (f(x) if b else 0) if a else 0", ["if b", "if a"]),
        ("acc = log(validate(model) if rank == 0 else 0)", []),
        ("acc = validate(model) if agree(rank) else 0", []),
        ("if rank == 0 and validate(model):\n        pass", ["if rank == 0"]),
        ("validate('x if y else z')", []),
    ],
)
def test_conditions_of_an_expression(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"def main():\n    {text}\n")
    inside = statements.enclosing(str(path), 2)
    assert [e.text for e in inside] == expected


def test_conditions_of_an_expression_on_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def main():\n"
        "    acc = (\n"
        "        validate(model)\n"
        "        if rank == 0\n"
        "        else 0.0\n"
        "    )\n"
        "    validate(model)\n"
        "    if rank == 0:\n"
        "        save(model)\n"
    )
    inside = {n: [e.text for e in statements.enclosing(str(path), n)] for n in (3, 7, 9)}
    assert inside == {3: ["if rank == 0"], 7: [], 9: ["if rank == 0:"]}


@pytest.mark.parametrize("guarded", [True, False])
def test_calls_of_a_branch_that_read_like_those_of_the_others(
    tmp_path: Path, guarded: bool
) -> None:
    made = tapes()
    outer = {30: "if local_rank == 0"} if guarded else {}
    for tape in made.values():
        _train(tape, 2)
    made[0].call("DDP forward", 96, "model(x)  # v", caller=30, branches=outer)
    made[0].call("barrier", 97, "barrier()  # v", caller=30, branches=outer)
    made[0].call(line=98, text="reduce(loss)  # v", caller=30, branches=outer)
    made[0].call("barrier", 50, "barrier()", caller=20, state=State.BEGUN)
    _forward(made[1])
    made[1].call("DDP backward", 60, "loss.backward()", caller=20, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("branch" if guarded else "reordered")
    assert finding.evidence["differs"] == ["order"]
    if guarded:
        assert finding.ranks == (0,)
        assert finding.location is not None
        assert finding.location.line == 96


def _train(tape: CallLog, rounds: int) -> None:
    for _ in range(rounds):
        _forward(tape)
        tape.call("DDP backward", 60, "loss.backward()", caller=20)


def _forward(tape: CallLog) -> None:
    tape.call("DDP forward", 49, "model(x)", caller=20)
    tape.call("barrier", 50, "barrier()", caller=20)
    tape.call(line=51, text="reduce(loss)", caller=20)


def _tried(*more: Statement) -> Sequence[Statement]:
    handler = Way(line=19, text="except Exception as e:", first=18, last=18)
    return (*more, Statement(line=17, text="try:", ways=(handler,)))


@pytest.mark.parametrize("world", [2, 4])
def test_a_call_left_out_by_an_exception_that_was_caught(tmp_path: Path, world: int) -> None:
    made = tapes(world)
    for rank, tape in made.items():
        tape.call("DDP backward", 10)
        if rank == 0:
            tape.call(line=21, state=State.BEGUN)
        else:
            tape.call("gather", 18, inside=_tried(), state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "swallowed-exception"
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 18
    assert 19 in [r.location.line for r in finding.related]


@pytest.mark.parametrize(
    ("inside", "line"),
    [
        (_tried(Statement(line=17, text="if full:")), 21),
        (_tried(Statement(line=17, text="for b in loader:")), 21),
        (_tried(Statement(line=17, text="past if empty:")), 21),
        ((Statement(line=17, text="try:"),), 21),
        ((), 21),
        (_tried(), 12),
    ],
)
def test_a_call_that_may_be_left_out_otherwise(
    tmp_path: Path, inside: Sequence[Statement], line: int
) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 10)
    made[0].call(line=line, state=State.BEGUN)
    made[1].call("gather", 18, inside=inside, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule != "swallowed-exception"


def test_the_one_that_a_condition_keeps_from_a_call_left_it_out(tmp_path: Path) -> None:
    made = tapes(4)
    for rank, tape in made.items():
        tape.call("DDP backward", 10)
        if rank == 1:
            tape.call("broadcast", 23, state=State.BEGUN)
        else:
            tape.call("all_gather", 21, inside=[(21, "if r != 1")], state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 21


@pytest.mark.parametrize("same_round", [True, False])
def test_who_is_in_the_next_round_did_not_enter_a_branch(tmp_path: Path, same_round: bool) -> None:
    made = tapes(4)
    for rank, tape in made.items():
        tape.call("DDP backward", 18, inside=[LOOP], step=25)
        if rank == 2:
            inside = [(20, "if spike(v):"), LOOP]
            tape.call(line=21, inside=inside, step=25)
            tape.call("DDP backward", 18, inside=[LOOP], step=25, state=State.BEGUN)
        elif same_round:
            tape.call("DDP backward", 19, inside=[LOOP], step=25, state=State.BEGUN)
        else:
            tape.call("DDP backward", 18, inside=[LOOP], step=26, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made, now=START + 60))
    assert finding.rule == ("unexplained" if same_round else "branch")
    assert finding.ranks == (2,)
    if not same_round:
        assert finding.deadlocked
