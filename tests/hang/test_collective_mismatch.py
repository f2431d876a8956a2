"""DDP601 over literal calls, and each of its traps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from recordings import site
from tapes import START, run_of, tapes

from ddpdoctor.events import (
    CallBlock,
    CallRun,
    Event,
    ExceptionPassed,
    FlightEntry,
    FlightLog,
    Site,
    Statement,
    StepDone,
    Way,
    Wrapped,
)
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

ON_ZERO = ((7, "if rank == 0:"),)


def found(run: Run) -> list[Finding]:
    return list(CollectiveMismatch().examine(run))


def test_barrier_on_rank_0_while_others_reduce(tmp_path: Path) -> None:
    made = tapes(3)
    for tape in made.values():
        tape.call(line=10).call(line=10)
    made[0].call("barrier", 8, inside=ON_ZERO, state=State.BEGUN, at=START + 5)
    for rank in (1, 2):
        made[rank].call(line=10, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "branch"
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 8
    assert [r.location.line for r in finding.related] == [7, 10]
    assert finding.deadlocked
    assert finding.evidence["call_number"] == 2


def test_a_forward_on_rank_0_while_ddp_rebuilds_its_buckets_on_the_others(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("DDP forward", 12, "model(x)").call("DDP backward", 13, "loss.backward()")
    late = {"step": 1, "at": START + 5, "state": State.BEGUN}
    made[0].call("DDP forward", 8, "model(sample)", inside=ON_ZERO, **late)
    made[1].call("DDP forward", 12, "model(x)", rebuilds=True, **late)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert (finding.rule, finding.ranks) == ("branch", (0,))
    assert finding.location is not None
    assert finding.location.line == 8
    assert "model.module" in finding.fix


def test_not_stuck_while_one_of_them_still_moves(tmp_path: Path) -> None:
    made = tapes()
    made[0].call("barrier", 8, state=State.BEGUN, at=START + 5)
    made[1].call(line=10, at=START + 5).call(line=11, at=START + 6.9)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "unexplained"
    assert not finding.deadlocked


DECORATED = Statement(
    line=6, text="@rank_zero_only", kind="decorated", test="rank == 0", of="if rank == 0:"
)


@pytest.mark.parametrize("through", ["log_dir", ""])
def test_a_decorator_that_calls_on_one_rank(tmp_path: Path, through: str) -> None:
    made = tapes(3)
    for tape in made.values():
        tape.call(line=20)
    made[0].call(
        "broadcast", 8, "folder = trainer.log_dir", inside=(DECORATED,), through=through,
        state=State.BEGUN, at=START + 5,
    )  # fmt: skip
    for rank in (1, 2):
        made[rank].call("barrier", 30, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert (finding.rule, finding.ranks) == ("branch", (0,))
    assert "`@rank_zero_only`" in finding.cause
    assert 6 in [r.location.line for r in finding.related]
    assert ("`log_dir`" in finding.fix) is bool(through)
    assert "broadcast on" not in finding.fix


def test_swap_that_no_shape_shows(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=3, text="all_reduce(z)")
    made[0].call(line=8, text="all_reduce(a)").call(line=9, text="all_reduce(b)")
    made[1].call(line=9, text="all_reduce(b)").call(line=8, text="all_reduce(a)")
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "reordered"
    assert finding.evidence["differs"] == ["order"]


def test_extra_call_that_pairs_with_the_next_one(tmp_path: Path) -> None:
    made = tapes()
    made[0].call(line=8, text="all_reduce(log)", inside=ON_ZERO)
    for _ in range(5):
        for tape in made.values():
            tape.call(line=10, text="all_reduce(grad)")
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 8


@pytest.mark.parametrize("same", [False, True], ids=["a barrier too many", "in step again"])
def test_a_barrier_that_was_paired_with_the_next_one(tmp_path: Path, same: bool) -> None:
    made = tapes()
    made[0].call("barrier", 8, "dist.barrier(group)", inside=ON_ZERO)
    made[1].call("barrier", 9, "dist.barrier()")
    made[0].call("barrier", 9, "dist.barrier()", state=State.DONE if same else State.BEGUN)
    if same:
        made[1].call("barrier", 12, "dist.barrier(other)")
        made[0].call("all_gather", 20, state=State.BEGUN, at=START + 5)
    made[1].call("DDP()", 20 - same, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 8))
    assert finding.rule == ("unexplained" if same else "branch")
    assert finding.location is not None
    if same:
        assert finding.location.line in (19, 20)
    else:
        assert (finding.ranks, finding.location.line) == ((0,), 8)


@pytest.mark.parametrize("later", [0, 3])
def test_a_barrier_too_many_that_reads_as_the_others_do(tmp_path: Path, later: int) -> None:
    made = tapes()
    text = "dist.barrier()"
    made[0].call("barrier", 8, text, inside=ON_ZERO)
    for line in range(9, 10 + later):
        made[1].call("barrier", line, text)
        made[0].call("barrier", line, text, state=State.DONE if line < 9 + later else State.BEGUN)
    made[1].call("all_gather", 20, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.location is not None
    assert (finding.ranks, finding.location.line) == ((0,), 8)


def test_barriers_of_both_arms_before_calls_that_differ(tmp_path: Path) -> None:
    made = tapes()
    one, other = ((5, "if rank == 0:"),), ((8, "else:  # if rank == 0:"),)
    made[0].call("barrier", 6, "dist.barrier()", inside=one)
    made[1].call("barrier", 9, "dist.barrier()", inside=other)
    made[0].call("barrier", 9, "dist.barrier()", inside=other, state=State.BEGUN)
    made[1].call("all_gather", 20, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "unexplained"
    assert finding.location is not None
    assert finding.location.line in (9, 20)


def test_groups_entered_in_opposite_order(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.group(1, "1", (0, 1)).group(2, "2", (0, 1))
        first = 1 if rank == 0 else 2
        tape.call(line=10 + rank, group=first, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "group-order"
    assert finding.ranks == (0, 1)
    assert finding.deadlocked


@pytest.mark.parametrize("rounds", [0, 4])
def test_a_call_of_a_group_that_one_of_its_ranks_left_out(tmp_path: Path, rounds: int) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.group(1, "1", (0, 1))
        for _ in range(rounds):
            tape.call(line=5, group=1).call(line=12)
        if rank == 0:
            tape.call(line=5, group=1, state=State.BEGUN, at=START + 5)
        else:
            tape.call(line=12, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == ("missing-call" if rounds else "group-order")
    assert str(finding.location) == "train.py:5"
    assert finding.ranks == ((1,) if rounds else (0, 1))


def test_point_to_point_is_no_collective(tmp_path: Path) -> None:
    made = tapes()
    made[0].call("send", 5, peer=1).call(line=9)
    made[1].call("recv", 6, peer=0).call(line=9)
    assert found(run_of(tmp_path, made)) == []


def test_a_rank_that_is_only_behind(tmp_path: Path) -> None:
    made = tapes()
    made[0].call(line=9).call(line=9).call("barrier", 11, state=State.BEGUN)
    made[1].call(line=9)
    assert found(run_of(tmp_path, made, now=START + 100)) == []


def test_other_groups_count_on_their_own(tmp_path: Path) -> None:
    made = tapes(4)
    for rank, tape in made.items():
        half = (0, 1) if rank < 2 else (2, 3)
        tape.group(1, "1" if rank < 2 else "2", half)
        tape.call("barrier" if rank < 2 else "all_reduce", 5 + rank // 2, group=1)
        tape.call(line=9)
    assert found(run_of(tmp_path, made)) == []


def test_call_that_turned_out_to_be_none(tmp_path: Path) -> None:
    made = tapes()
    made[0].call("DDP backward", 5, state=State.VOID)
    made[0]._next[0] = 0
    for tape in made.values():
        tape.call(line=9)
    assert found(run_of(tmp_path, made)) == []


@pytest.mark.parametrize("repeats", [1, 1000])
def test_folded_blocks_are_compared_however_they_were_cut(tmp_path: Path, repeats: int) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, text="r(a)").call(line=10, text="r(b)")
        tape.calls.clear()
    codes = (0, 0, 0, 1)
    whole = [CallBlock(at=0, id=0, codes=codes), CallRun(at=0, group=0, first=0, block=0,
                                                         repeat=2 * repeats)]  # fmt: skip
    parts = [
        CallBlock(at=0, id=0, codes=codes),
        CallRun(at=0, group=0, first=0, block=0, repeat=repeats),
        CallRun(at=0, group=0, first=2 * repeats, block=0, repeat=repeats),
    ]
    assert found(run_of(tmp_path, made, more={0: whole, 1: parts})) == []
    parts[2] = CallRun(at=0, group=0, first=2 * repeats, block=1, repeat=1)
    parts.append(CallBlock(at=0, id=1, codes=(0, 1, 0, 0)))
    swapped = run_of(tmp_path / "more", made, more={0: whole, 1: parts})
    (finding,) = found(swapped)
    assert finding.rule == "reordered"
    assert finding.evidence["call_number"] == 2 * repeats


def test_another_call_of_one_helper_with_another_shape(tmp_path: Path) -> None:
    made = tapes()
    made[0].call(line=8, text="reduce(loss)", numel=1, inside=ON_ZERO, state=State.BEGUN)
    made[1].call(line=12, text="reduce(grad)", numel=8, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.ranks == (0,)
    assert finding.location is not None
    assert finding.location.line == 8


@pytest.mark.parametrize("under_way", [True, False])
def test_a_backward_that_only_computes_is_not_stuck(tmp_path: Path, under_way: bool) -> None:
    made = tapes()
    made[0].call("barrier", 8, state=State.BEGUN, at=START + 5)
    made[1].call("DDP backward", 12, state=State.BEGUN, at=START + 5)
    entry = FlightEntry(
        sequence=3, op="all_reduce", sizes="[[4]]", dtypes="Float", retired=not under_way
    )
    log = FlightLog(at=START + 6, group="0", entries=(entry,))
    (finding,) = found(run_of(tmp_path, made, more={1: [log]}, now=START + 9))
    assert finding.rule == "unexplained"
    assert finding.deadlocked is under_way


@pytest.mark.parametrize("text", ["recall.compute()", "recall()"])
def test_calls_that_a_library_makes_are_no_rounds_of_the_program(tmp_path: Path, text: str) -> None:
    loop = ((8, "for step in range(20):"),)
    made = tapes()
    for tape in made.values():
        for _ in range(5):
            tape.call(line=16, inside=loop, numel=3)
            tape.call("barrier", 12, text, inside=loop, through="compute")
        tape.call(line=16, inside=loop, numel=3)
    made[0].call("barrier", 12, text, inside=loop, through="compute", state=State.BEGUN,
                 at=START + 5)  # fmt: skip
    made[1].call(line=16, inside=loop, numel=3, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert (finding.rule, finding.ranks) == ("missing-call", (1,))
    assert "rounds" not in finding.cause
    assert "rank 1 made fewer of its calls than the others" in finding.cause
    assert ("`compute`" in finding.cause) is ("compute" in text)


@pytest.mark.parametrize(("rounds", "told"), [(6, True), (2, False)])
def test_a_call_that_a_rank_made_in_every_round_before(
    tmp_path: Path, rounds: int, told: bool
) -> None:
    way = Way(line=13, text="except ValueError:", first=9, last=12)
    around = (Statement(line=8, text="for step in range(20):", ways=(way,)),)
    loop = ((15, "for p in params:"), (8, "for step in range(20):"))
    made = tapes()
    for tape in made.values():
        for _ in range(rounds):
            tape.call(line=16, inside=loop, numel=9).call(line=16, inside=loop, numel=3)
            tape.call(line=12, inside=around, numel=1)
        tape.call(line=16, inside=loop, numel=9).call(line=16, inside=loop, numel=3)
    made[0].call(line=12, inside=around, numel=1, state=State.BEGUN, at=START + 5)
    made[1].call(line=16, inside=loop, numel=9, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == ("missing-call" if told else "loop-exit")
    if told:
        assert finding.ranks == (1,)
        assert str(finding.location) == "train.py:12"


def test_a_round_more_is_no_call_left_out(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        for _ in range(5):
            tape.call(line=9, numel=8).call("barrier", 10)
    made[0].call("barrier", 20, state=State.BEGUN, at=START + 5)
    made[1].call(line=9, numel=8, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "unexplained"


@pytest.mark.parametrize("raised", [4.9, 0.5])
def test_a_barrier_in_finally_on_the_way_out_of_an_exception(tmp_path: Path, raised: float) -> None:
    made = tapes()
    loop = (Statement(line=8, text="for x in loader:"), Statement(line=7, text="try:"))
    for tape in made.values():
        tape.call(line=9, inside=loop, at=START + 2).call(line=9, inside=loop)
    made[0].call("barrier", 12, inside=((11, "finally:"),), state=State.BEGUN, at=START + 5)
    made[1].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    bad = ExceptionPassed(at=START + raised, where="data", kind="ValueError", message="bad", step=2)
    (finding,) = found(run_of(tmp_path, made, more={0: [bad]}, now=START + 7))
    assert finding.rule == ("exception-exit" if raised > 2 else "loop-exit")


@pytest.mark.parametrize(
    ("head", "tried", "kind", "told"),
    [
        ("finally:", 8, "LookupError", True),
        ("except Exception:", 8, "LookupError", True),
        ("except StopIteration:", 8, "StopIteration", False),
        ("except ImportError:", 20, "LookupError", False),  # of another `try`
    ],
)
def test_an_exception_that_was_being_handled_at_the_call(
    tmp_path: Path, head: str, tried: int, kind: str, told: bool
) -> None:
    made = tapes()
    handler = Way(line=10, text="except OSError:", first=9, last=9)
    loop = (Statement(line=8, text="for x in loader:", ways=(handler,)),)
    for tape in made.values():
        tape.call(line=9, inside=loop, at=START + 2).call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 12, inside=((11, head),), state=State.BEGUN, at=START + 5)
    passed = ExceptionPassed(
        at=START + 4.9, where="unwinding", kind=kind, message="x", step=2, site=1, tried=2
    )
    lines = [site(1, "train.py", 30, function="label"), site(2, "train.py", tried)]
    (finding,) = found(run_of(tmp_path, made, more={1: [*lines, passed]}, now=START + 7))
    assert finding.rule == ("exception-exit" if told else "loop-exit")
    if told:
        assert (str(finding.location), finding.ranks) == ("train.py:12", (1,))


@pytest.mark.parametrize(
    ("function", "tried", "told"),
    [("__exit__", 41, True), ("close", 41, False), ("__exit__", 30, False)],
    ids=["", "of no `with`", "before the `with`"],
)
def test_an_exception_that_is_held_back_while_a_with_block_is_left(
    tmp_path: Path, function: str, tried: int, told: bool
) -> None:
    made = tapes()
    loop = ((8, "for x in loader:"),)
    for tape in made.values():
        tape.call(line=9, inside=loop, at=START + 2).call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 21, caller=40, state=State.BEGUN, at=START + 5)
    made[1].events = [
        msgspec.structs.replace(e, function=function)
        if isinstance(e, Site) and e.line == 21
        else msgspec.structs.replace(e, text="with Session() as session:")
        if isinstance(e, Site) and e.line == 40
        else e
        for e in made[1].events
    ]
    passed = ExceptionPassed(
        at=START + 4.9, where="unwinding", kind="ValueError", message="no number", step=2, site=1,
        tried=2,
    )  # fmt: skip
    lines = [site(1, "train.py", 30), site(2, "train.py", tried, function="fit")]
    (finding,) = found(run_of(tmp_path, made, more={1: [*lines, passed]}, now=START + 7))
    assert (finding.rule == "exception-exit") is told
    if told:
        assert (str(finding.location), finding.ranks) == ("train.py:21", (1,))
        assert "ValueError: no number (train.py:30)" in finding.cause


@pytest.mark.parametrize("rounds", [5, 1])
def test_of_two_ranks_the_one_in_the_rarer_call(tmp_path: Path, rounds: int) -> None:
    made = tapes()
    full, arm = ((19, "if len(rows) >= every:"),), ((29, "else:  # if fault:"),)
    for rank, tape in made.items():
        for step in range(rounds):
            tape.call("barrier", 12, step=2 * step).call(line=30, inside=arm, step=2 * step)
        tape.call("barrier", 12).call("gather_object", 20, root=0, inside=full)
        if rank == 0:
            tape.call("gather_object", 20, root=0, inside=full, state=State.BEGUN, at=START + 50)
        else:
            tape.call(line=30, inside=arm, state=State.BEGUN, at=START + 50)
    (finding,) = found(run_of(tmp_path, made, now=START + 52))
    assert finding.rule == "unexplained"
    assert finding.location is not None
    if rounds == 5:
        assert (finding.ranks, finding.location.line) == ((0,), 20)
        assert 19 in [r.location.line for r in finding.related]
    else:  # it cannot be told
        assert finding.ranks == (0, 1)
        assert not {19, 29} & {r.location.line for r in finding.related}


@pytest.mark.parametrize("shadows", [True, False])
def test_a_rank_that_is_done_answers_the_others_calls_under_join(
    tmp_path: Path, shadows: bool
) -> None:
    made = tapes()
    for rank, tape in made.items():
        for _ in range(3 + rank):
            tape.call(line=10)
        for _ in range(2 - rank):
            tape.call(line=8, shadows=shadows)
    assert bool(found(run_of(tmp_path, made))) is not shadows


def test_a_callback_that_a_thread_of_the_backend_runs_has_no_lines(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        for threads in ((), (0,), (), (1,), ()):  # `fut.then(lambda f: dist.all_reduce(q))`
            tape.call(line=10)
            tape.call(line=-1 if rank in threads else 10, numel=2)
    assert not found(run_of(tmp_path, made))


@pytest.mark.parametrize("in_turn", [False, True])
def test_steps_of_several_optimizers(tmp_path: Path, in_turn: bool) -> None:
    """One that steps another, or one after the other: as the table of ranks has them."""
    order = (0, 0, 0, 1, 1, 1) if in_turn else (1, 0, 1, 0, 1, 0)
    steps = [
        StepDone(
            at=START + n / 10,
            optimizer=o,
            step=order[:n].count(o),
            site=-1,
            wall_s=0.1,
            backward_s=0.05,
        )
        for n, o in enumerate(order)
    ]
    made = tapes()
    for tape in made.values():
        tape.call(step=0)
    made[0].call("barrier", 20, step=6)
    made[1].call(line=30, step=6)
    (finding,) = found(run_of(tmp_path, made, more=dict.fromkeys(made, steps)))
    assert finding.rule == "unexplained"
    assert finding.steps is not None and finding.steps.first == (5 if in_turn else 2)


def backwards(tmp_path: Path, models: tuple[int, int] = (0, 1), **wrap: object) -> list[Finding]:
    """Three backwards of a critic and one of a generator in each round; in the second one rank 1
    leaves the critic's loop a backward early."""
    made = tapes()
    for rank, tape in made.items():
        step = 0
        for turn in range(4):
            for inner in range(3):
                tape.call("DDP backward", 21, text="loss.backward()", step=step, model=models[0])
                step += 1
                if (rank, turn, inner) == (1, 1, 1):
                    break
            tape.call("DDP backward", 27, text="fooled.backward()", step=step, model=models[1])
            step += 1
    fields: dict[str, Any] = {"wrapper": "DistributedDataParallel", "group": 0, "site": -1, **wrap}
    more: dict[int, list[Event]] = {
        rank: [
            *(Wrapped(at=START, model=n, kind="Net", **fields) for n in range(2)),
            StepDone(
                at=START + 2, optimizer=0, step=15 - rank, site=-1, wall_s=1.0, count=16 - rank
            ),
        ]
        for rank in made
    }
    return found(run_of(tmp_path, made, more=more, now=START + 9))


def test_backwards_of_two_models_that_pair(tmp_path: Path) -> None:
    (finding,) = backwards(tmp_path)
    assert finding.rule == "reordered"
    assert finding.evidence["call_number"] == 6


@pytest.mark.parametrize("model", [0, 1])
def test_an_extra_backward_that_meets_that_of_another_model(tmp_path: Path, model: int) -> None:
    """gloo aborts in it, so that nothing comes after; the forwards before it are of one model."""
    made = tapes()
    for tape in made.values():
        tape.call("DDP backward", 21, text="d_loss.backward()", step=0, model=0)
    made[0].call("DDP forward", 23, text="real = d(x)", step=1, model=0)
    made[1].call("DDP forward", 26, text="fake = d(g(z))", step=1, model=0)
    made[0].call("DDP backward", 24, text="r1.backward()", step=1, model=0)
    made[1].call("DDP backward", 27, text="g_loss.backward()", step=1, model=model)
    more: dict[int, list[Event]] = {
        rank: [
            Wrapped(at=START, model=n, kind="Net", wrapper="DistributedDataParallel", group=0,
                    site=-1) for n in range(2)
        ] for rank in made
    }  # fmt: skip
    told = found(run_of(tmp_path, made, more=more, now=START + 9))
    assert [f.evidence["call_number"] for f in told] == ([2] if model else [])


def in_turn(
    tmp_path: Path, orders: Sequence[Sequence[int]], steps: int = 3, late: int = -1
) -> list[Finding]:
    """One line in a loop over models makes the backwards of all of them. The wraps of rank `late`
    were not seen."""
    made = tapes(len(orders))
    for rank, tape in made.items():
        for step in range(steps):
            for model in orders[rank]:
                tape.call("DDP backward", 21, text="loss.backward()", step=step, model=model,
                          inside=[(20, "for loss in losses:")])  # fmt: skip
    more: dict[int, list[Event]] = {
        rank: [
            Wrapped(at=START, model=n, kind="Net", wrapper="DistributedDataParallel", group=0,
                    site=-1, adopted=rank == late) for n in range(2)
        ] for rank in made
    }  # fmt: skip
    return found(run_of(tmp_path, made, more=more, now=START + 9))


@pytest.mark.parametrize("steps", [1, 3])
def test_models_in_another_order_at_one_line(tmp_path: Path, steps: int) -> None:
    (finding,) = in_turn(tmp_path / "other", [(0, 1), (0, 1), (1, 0)], steps)
    assert (finding.rule, finding.ranks) == ("model-order", (2,))
    assert "rank 2 is in the backward of model 1 (Net) and ranks 0-1 are" in finding.summary
    assert [r.location.line for r in finding.related] == [20]
    assert not in_turn(tmp_path / "same", [(1, 0), (1, 0), (1, 0)], steps)
    assert not in_turn(tmp_path / "late", [(0, 1), (0, 1), (1, 0)], steps, late=2)
    (aborted,) = in_turn(tmp_path / "first", [(0,), (1,)], 1)  # gloo aborts in the first one
    assert aborted.rule == "model-order"


def test_backwards_that_may_be_of_one_model(tmp_path: Path) -> None:
    assert not backwards(tmp_path / "one", (0, 0)), "two lines train it, by turns"
    assert not backwards(tmp_path / "several", (-1, -1)), "not known"
    assert not backwards(tmp_path / "half", (0, -1))
    assert not backwards(tmp_path / "late", adopted=True), "not counted from the first one on"
    assert not backwards(tmp_path / "own", options={"init_sync": False})


def test_drift_follows_from_gradients_of_two_models_that_are_mixed(tmp_path: Path) -> None:
    (mine,) = backwards(tmp_path)
    fields: dict[str, Any] = {"code": "DDP401", "severity": mine.severity, "summary": ""}
    drift = msgspec.structs.replace(mine, check="gradient-drift", at=mine.at + 1, **fields)
    assert CollectiveMismatch().explains(mine, drift)
    before = msgspec.structs.replace(drift, at=mine.at - 5)
    assert before.rule == "reordered"
    assert not CollectiveMismatch().explains(mine, before)
    other = msgspec.structs.replace(mine, subjects=("barrier",))
    assert not CollectiveMismatch().explains(other, drift)


def joined(tmp_path: Path, average: bool | None, *, hook: bool | None = True) -> list[Finding]:
    """Rank 0 is done and answers in `Join`; rank 1 trains on and averages its loss.

    Args:
        average: whether torch makes that call itself; hook: whether it makes the answers.
    """
    made = tapes(2)
    for rank, tape in made.items():
        for step in range(4):
            done = rank == 0 and step > 1
            tape.call(
                line=30 if done else 8, step=step, shadows=done, internal=hook if done else True
            )
            if not done:
                tape.call(line=9, text="dist.all_reduce(loss)", step=step, internal=average)
    return found(run_of(tmp_path, made))


def test_a_collective_of_the_program_that_join_does_not_answer(tmp_path: Path) -> None:
    (finding,) = joined(tmp_path, False)
    assert (finding.rule, finding.ranks) == ("not-answered-in-join", (1,))
    assert finding.location is not None and finding.location.line == 9


@pytest.mark.parametrize("average, hook", [(True, True), (False, False), (None, None)])
def test_what_torch_or_the_program_answers_in_join(
    tmp_path: Path, average: bool | None, hook: bool | None
) -> None:
    """Calls of torch, those of a `JoinHook` of the program's, and records of before."""
    assert joined(tmp_path, average, hook=hook) == []


def test_a_branch_whose_calls_pair_is_no_reason(tmp_path: Path) -> None:
    """A library computes something at first use: on rank 0 under a branch, on rank 1 later, on the
    line of all its other calls. These pair; what follows them does not."""
    made, fit = tapes(), {"line": 20, "text": "trainer.fit(model)"}
    for tape in made.values():
        tape.call("DDP backward", **fit)  # type: ignore[arg-type]
    for _ in range(3):
        made[0].call(line=8, inside=ON_ZERO)
        made[1].call(**fit)  # type: ignore[arg-type]
    made[0].call("broadcast", **fit, state=State.BEGUN)  # type: ignore[arg-type]
    made[1].call("barrier", **fit, state=State.BEGUN)  # type: ignore[arg-type]
    (finding,) = found(run_of(tmp_path, made, now=START + 9))
    assert finding.rule == "unexplained"
    assert (finding.ranks, finding.evidence["call_number"]) == ((0, 1), 4)
