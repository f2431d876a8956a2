"""DDP601 where a rank left a loop early, or skipped a round of it, over literal calls."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from recordings import site
from tapes import START, CallLog, run_of, tapes

from ddpdoctor.events import (
    CALLERS,
    CallSite,
    EpochBegan,
    EpochEnded,
    Event,
    ExceptionPassed,
    IndicesRead,
    LoaderSeen,
    Place,
    Site,
    Statement,
    Way,
    Wrapped,
)
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State


def found(run: Run) -> list[Finding]:
    return list(CollectiveMismatch().examine(run))


def test_a_loop_that_one_rank_has_left(tmp_path: Path) -> None:
    made = tapes()
    loop = ((8, "for step in range(20):"),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "loop-exit"
    assert 8 in [r.location.line for r in finding.related]
    assert finding.ranks == (0, 1), "too early on the one, or too late on the other"


@pytest.mark.parametrize("alone", [True, False])
def test_a_call_in_a_loop_that_one_rank_alone_ever_makes(tmp_path: Path, alone: bool) -> None:
    """Rank 0 validates at the end of each round; the other one is through with the last of them."""
    made = tapes()
    rounds = (8, "for epoch in range(2):")
    for tape in made.values():
        tape.call(line=9, inside=(rounds,))
        if not alone:
            tape.call("DDP forward", 12, inside=((11, "if rank == 0 or late:"), rounds))
    on_zero = ((11, "if rank == 0 or late:"), rounds)
    made[0].call("DDP forward", 12, inside=on_zero, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == ("branch" if alone else "loop-exit")
    assert finding.ranks == (0,)


def test_the_statement_by_which_a_rank_has_left_a_loop(tmp_path: Path) -> None:
    made = tapes()
    way = Way(line=11, text="if stop(loss):", first=13, last=13)
    loop = (Statement(line=8, text="for step in range(20):", exits=(way,)),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "loop-exit"
    assert finding.ranks == (1,)
    assert str(finding.location) == "train.py:11"


@pytest.mark.parametrize(
    ("around", "guarded"),
    [
        (((10, "if epoch > 2:"), (9, "if rank == 0:")), True),
        (((10, "if epoch > 2:"),), False),
        (((10, 'if mode == "rank0":'),), False),
        ((), False),
    ],
)
def test_only_one_rank_comes_to_the_statement_that_ends_the_loop(
    tmp_path: Path, around: tuple[tuple[int, str], ...], guarded: bool
) -> None:
    made = tapes()
    way = Way(line=11, text="if stop(loss):", first=12, last=13, around=around)
    loop = (Statement(line=8, text="for step in range(20):", exits=(way,)),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[1].call(line=13, inside=loop, state=State.BEGUN, at=START + 5)
    made[0].call("barrier", 15, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert (finding.rule, finding.ranks) == ("loop-exit", (0,))
    assert ("`if rank == 0:` (train.py:9) comes to it" in finding.cause) is guarded
    assert ("dist.broadcast(stop, src=0)" in finding.fix) is guarded


def test_most_ranks_left_a_loop_by_a_known_statement(tmp_path: Path) -> None:
    """The one that is still in it may be right or wrong; the line to change is the same."""
    made = tapes(3)
    way = Way(line=11, text="if stop(loss):", first=13, last=13)
    loop = (Statement(line=8, text="for step in range(20):", exits=(way,)),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    for rank in (1, 2):
        made[rank].call("barrier", 14, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "loop-exit"
    assert str(finding.location) == "train.py:11"


@pytest.mark.parametrize("between", [True, False])
def test_a_loop_that_the_others_came_to_once_more(tmp_path: Path, between: bool) -> None:
    made = tapes()
    loop = ((8, "for step in range(20):"),)
    on_zero = ((13, "if rank == 0 or stale(path):"),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
        if between:
            tape.call("all_gather_object", 11)
    made[0].call("barrier", 14, inside=on_zero, state=State.BEGUN, at=START + 5)
    made[1].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == ("branch" if between else "loop-exit")
    if between:
        assert finding.ranks == (0,)


@pytest.mark.parametrize("branch", ["if rank == 0:", "if bad:"])
def test_an_inner_loop_that_the_others_came_to_once_more(tmp_path: Path, branch: str) -> None:
    made = tapes()
    loop = ((8, "for _ in range(2):"), (6, "for update in range(9):"))
    for tape in made.values():
        tape.call(line=9, inside=loop).call(line=9, inside=loop)
    made[0].call("barrier", 14, inside=((13, branch), loop[1]), state=State.BEGUN, at=START + 5)
    made[1].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    on_rank = branch == "if rank == 0:"
    assert finding.rule == ("branch" if on_rank else "loop-exit")
    if on_rank:
        assert (finding.ranks, finding.location.line) == ((0,), 14)


def test_a_loop_in_a_caller_that_is_on_record(tmp_path: Path) -> None:
    made = tapes()
    loop = ((8, "for _ in range(2):"), (6, "for update in range(9):"))

    def deep(tape: CallLog, line: int, *inside: tuple[int, str], **more: object) -> None:
        """A call in functions that the loop's calls, with no record of who calls that."""
        tape.call(line=line, inside=inside, **more)  # type: ignore[arg-type]
        last = tape.events.pop()
        assert isinstance(last, CallSite)
        number = 300 + line
        helper = site(number, "train.py", line, function="metrics")
        places = (Place(site=number),) * (CALLERS - 1)
        tape.events += [helper, msgspec.structs.replace(last, places=(*places, *last.places))]

    for tape in made.values():
        tape.call(line=9, inside=loop)
        deep(tape, 11, loop[1])
    deep(made[0], 14, (13, "if last:"), loop[1], numel=1, state=State.BEGUN, at=START + 5)
    made[1].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "branch"


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_call_of_a_thread_says_nothing_of_a_loop(tmp_path: Path, everywhere: bool) -> None:
    made = tapes()
    loop = ((8, "for step in range(20):"),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=30, numel=7, thread="ckpt").call(line=9, inside=loop)
    made[1].call(line=9, inside=loop)
    if everywhere:
        made[1].call(line=30, numel=7, thread="ckpt")
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("thread" if everywhere else "unexplained")
    if everywhere:
        assert (str(finding.location), finding.ranks) == ("train.py:30", (0, 1))


def test_a_call_of_a_thread_without_lines_is_where_that_was_started(tmp_path: Path) -> None:
    made = tapes()
    loop = ((8, "for step in range(20):"),)
    save = "dcp.async_save(state)"
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call("gather_object", 30, save, thread="saver", started=True, root=0)
    made[0].call(line=9, inside=loop)
    made[1].call(line=9, inside=loop)
    made[1].call("gather_object", 30, save, thread="saver", started=True, root=0)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "thread"
    assert (str(finding.location), finding.ranks) == ("train.py:30", (0, 1))


def test_a_round_that_one_rank_has_skipped(tmp_path: Path) -> None:
    made = tapes()
    way = Way(line=5, text="if short:", first=6, last=12)
    loop = (Statement(line=4, text="for step in range(20):", ways=(way,)),)
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "skipped-round"
    assert (finding.location.line, finding.ranks) == (5, (1,))


NESTED = ((8, "for x, y in loader:"), (6, "for epoch in range(9):"))


def left_early(
    *,
    epochs: int,
    exhausted: bool,
    batches: int = -1,
    read: int = 1,
    steps: int = 1,
    stream: bool = False,
) -> list[Event]:
    """The epochs of a loader (which says to have `batches`), all but the last over."""
    events: list[Event] = [
        site(50, "train.py", 8, "for x, y in loader:"),
        LoaderSeen(
            at=START,
            loader=0,
            site=50,
            loop_site=50,
            dataset="D",
            length=8,
            sampler="S",
            iterable=stream,
        ),
    ]
    for number in range(epochs):
        began = EpochBegan(
            at=START + number, loader=0, epoch=number, step=number, site=50, batches=batches
        )
        events.append(began)
        if number < epochs - 1 or exhausted:
            end = EpochEnded(
                at=START + number + 0.5, loader=0, epoch=number, batches=read, samples=4,
                backwards=steps, exhausted=True,
            )  # fmt: skip
            events.append(end)
    return events


@pytest.mark.parametrize(
    ("done", "line", "advice"), [(1, 6, "share a decision"), (2, 8, "number of batches")]
)
def test_the_loop_that_was_left_of_nested_ones(
    tmp_path: Path, done: int, line: int, advice: str
) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=NESTED)
    made[0].call(line=9, inside=NESTED, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    more = {
        0: left_early(epochs=2, exhausted=False),
        1: left_early(epochs=done, exhausted=True),
    }
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert finding.rule == "loop-exit"
    assert [r.location.line for r in finding.related if "left" in r.label] == [line]


@pytest.mark.parametrize(
    ("batches", "read", "steps", "told"),
    [
        (6, 6, 3, "took a step for only 3 of its 6 batches in the loop at train.py:8"),
        (6, 5, 5, "its loader had fewer batches there"),
        (6, 6, 6, "left the loop at train.py:6 before the others; "),
    ],
)
def test_how_a_loop_over_a_loader_was_left(
    tmp_path: Path, batches: int, read: int, steps: int, told: str
) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=NESTED)
    made[0].call(line=9, inside=NESTED, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    more = {
        0: left_early(epochs=1, exhausted=False, batches=batches),
        1: left_early(epochs=1, exhausted=True, batches=batches, read=read, steps=steps),
    }
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert finding.rule == ("skipped-round" if steps < read else "loop-exit")


@pytest.mark.parametrize(
    ("stream", "wrapper", "backwards", "advice", "joins"),
    [
        (False, "DistributedDataParallel", 5, "`drop_last=True`", True),
        (True, "DistributedDataParallel", 5, "`all_reduce` (`ReduceOp.MIN`)", True),
        (True, "fully_shard", 5, "`all_reduce` (`ReduceOp.MIN`)", False),
        (True, "DistributedDataParallel", 0, "`all_reduce` (`ReduceOp.MIN`)", False),
    ],
)
def test_what_to_do_about_fewer_batches(
    tmp_path: Path, stream: bool, wrapper: str, backwards: int, advice: str, joins: bool
) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=NESTED)
    made[0].call(line=9, inside=NESTED, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    wrapped = Wrapped(at=START, model=0, wrapper=wrapper, kind="Net", group=0, site=50)
    ended = left_early(epochs=1, exhausted=True, read=5, steps=backwards, stream=stream)
    more = {0: left_early(epochs=1, exhausted=False, stream=stream), 1: [wrapped, *ended]}
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert "fewer batches (5)" in finding.cause
    assert advice in finding.fix and ("Join" in finding.fix) is joins


@pytest.mark.parametrize("looked", [True, False])
def test_a_loop_over_a_loader_that_has_nothing_for_a_rank(tmp_path: Path, looked: bool) -> None:
    """It never made a call in the loop, but the loader was asked."""
    made = tapes()
    for tape in made.values():
        tape.call("barrier", 4)
    made[0].call("DDP forward", 9, inside=NESTED, state=State.BEGUN, at=START + 5)
    made[1].call(line=14, state=State.BEGUN, at=START + 5)
    nothing = left_early(epochs=1, exhausted=True, read=0, steps=0, stream=True)
    more = {0: left_early(epochs=1, exhausted=False, stream=True), 1: nothing if looked else []}
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert (finding.rule == "loop-exit") is looked
    if looked:
        assert "fewer batches (0)" in finding.cause and "every rank gets some" in finding.fix


@pytest.mark.parametrize(("read", "inner"), [(6, True), (5, False)])
def test_a_loop_inside_of_one_over_equally_many_batches(
    tmp_path: Path, read: int, inner: bool
) -> None:
    """Rank 1 read all of its batches, and has fewer parts in them to train on."""
    made = tapes()
    loops = ((8, "for part in parts:"), (6, "for x, parts in loader:"))
    for tape in made.values():
        tape.call(line=9, inside=loops)
    made[0].call(line=9, inside=loops, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    more = {
        0: [site(50, "train.py", 6, loops[1][1]), *left_early(epochs=1, exhausted=False,
            batches=6)[1:]],
        1: [site(50, "train.py", 6, loops[1][1]), *left_early(epochs=1, exhausted=True, batches=6,
            read=read, steps=read)[1:]],
    }  # fmt: skip
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert finding.rule == "loop-exit"
    assert (finding.location.line == 8) is inner
    assert ("fewer iterations of `for part in parts:`" in finding.cause) is inner


GENERATED = (
    Statement(
        line=8,
        text="for x, y in log_every(loader):",
        ways=(Way(line=7, text="if bad(x):", first=8, last=12),),
    ),
)


@pytest.mark.parametrize(
    ("at", "loader", "steps", "told"),
    [(2.0, 1, 0, True), (0.2, 1, 0, False), (2.0, 0, 0, False), (2.0, 1, 3, False)],
)
def test_a_loop_over_a_generator_that_reads_a_loader(
    tmp_path: Path, at: float, loader: int, steps: int, told: bool
) -> None:
    """Rank 0 skipped a batch and evaluates; not so where it begins the other loader in the loop, or
    the same one again, or trains on that. What rank 1 does with its batch, nobody can tell yet."""
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=GENERATED, caller=(30,))
    made[1].call(line=9, inside=GENERATED, caller=(30,), state=State.BEGUN, at=START + 5)
    made[0].call("barrier", 40, caller=(41, 42, 31), state=State.BEGUN, at=START + 5)
    made[0].events = [
        msgspec.structs.replace(e, function="evaluate") if isinstance(e, Site) and e.line == 40
        else e for e in made[0].events
    ]  # fmt: skip

    def over(*events: Event) -> list[Event]:
        """The loader is read by a line of the generator."""
        return [site(50, "train.py", 3, "for x in loader:"), *events[1:]]

    evaluation = [
        LoaderSeen(at=START, loader=1, site=51, loop_site=50, dataset="D", length=8, sampler="S"),
        EpochBegan(at=START + at, loader=loader, epoch=1, step=5, site=50, batches=6),
        EpochEnded(
            at=START + 3, loader=loader, epoch=1, batches=6, samples=6, backwards=steps,
            exhausted=True,
        ),
    ]  # fmt: skip
    read = IndicesRead(
        at=START + 4, loader=0, epoch=0, batches=5, samples=4, backwards=4, indices=""
    )
    more = {
        0: [*over(*left_early(epochs=1, exhausted=True, batches=6, read=6, steps=5)), *evaluation],
        1: [*over(*left_early(epochs=1, exhausted=False, batches=6)), read],
    }
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert finding.rule == ("skipped-round" if told else "loop-exit")
    if told:
        assert (finding.ranks, finding.location.line) == ((0,), 7)


HANDLER = Way(line=16, text="except ValueError:", first=7, last=10)


def swallowed(tmp_path: Path, inside: tuple[Statement, ...], *more: Event) -> Finding:
    """Rank 1 skipped a batch; rank 0 lost it in a call of the loop and went on to its end."""
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=inside)
    made[0].call(line=9, inside=inside, state=State.FAILED, at=START + 5)
    made[1].call("barrier", 18, state=State.BEGUN, at=START + 4.9)
    left = [msgspec.structs.replace(e, at=START + 4) for e in left_early(
        epochs=1, exhausted=True, batches=6, read=6, steps=5)]  # fmt: skip
    stay = left_early(epochs=1, exhausted=True, batches=6, read=6, steps=6)
    stay[-1] = msgspec.structs.replace(stay[-1], at=START + 6)
    (finding,) = found(run_of(tmp_path, made, more={0: stay, 1: [*left, *more]}))
    return finding


def test_a_rank_that_goes_on_after_its_call_failed_was_in_the_loop_in_it(tmp_path: Path) -> None:
    finding = swallowed(tmp_path, (Statement(line=8, text="for x, y in loader:", ways=(HANDLER,)),))
    assert finding.rule == "skipped-round"
    assert (finding.ranks, finding.location.line) == ((1,), 16)
    assert finding.evidence["took_no_step_for_a_batch"] == [1]


def test_a_continue_in_another_arm_leaves_out_nothing_here(tmp_path: Path) -> None:
    loop = Statement(line=8, text="for x, y in loader:", ways=(HANDLER,))
    other = Way(line=3, text="if bad:", first=4, last=20)
    arm = Statement(line=5, text='elif mode == "b":  # if mode == "a":', opener=2)
    seen = ExceptionPassed(
        at=START + 3, where="handler", kind="ValueError", message="bad", step=4, site=50, tried=50
    )
    finding = swallowed(tmp_path, (arm, msgspec.structs.replace(loop, ways=(other, HANDLER))), seen)
    assert finding.rule == "skipped-round"
    assert (finding.ranks, finding.location.line) == ((1,), 16)
    assert 5 not in [r.location.line for r in finding.related]


def in_a_helper(tape: CallLog, caller: int) -> None:
    """The last call was made by a function that this line called."""
    last = tape.events.pop()
    assert isinstance(last, CallSite)
    number = 200 + caller
    tape.events += [
        Site(at=START, id=number, file="/home/user/project/train.py", line=caller,
             function="train", text="run()"),
        msgspec.structs.replace(last, places=(*last.places, Place(site=number))),
    ]  # fmt: skip


def test_another_call_of_the_function_with_the_loop(tmp_path: Path) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.call(line=9, inside=NESTED[:1])
        in_a_helper(tape, 30)
        tape.call(line=9, text="again", inside=NESTED[:1], state=State.BEGUN, at=START + 5)
        if rank == 0:
            tape.calls.pop()
            tape._next[0] -= 1
            tape.events.pop()
            tape.call("all_reduce", 12, numel=1, state=State.BEGUN, at=START + 5)
        in_a_helper(tape, 34 if rank == 0 else 30)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "unexplained"


def test_only_the_inner_loop_was_left(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=NESTED)
    made[0].call(line=9, inside=NESTED, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, inside=NESTED[1:], state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "loop-exit"


RELAX = (8, "while error > tolerance:")
EPOCHS = (4, "for epoch in range(9):")


@pytest.mark.parametrize("bounds", ["range(4)", "stages"])
def test_a_loop_of_as_many_rounds_on_all_was_not_left(tmp_path: Path, bounds: str) -> None:
    made = tapes()
    loops = (RELAX, (6, f"for stage in {bounds}:"), EPOCHS)
    for tape in made.values():
        tape.call(line=9, inside=loops)
    made[0].call(line=9, inside=loops, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, inside=loops[2:], state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "loop-exit"
    shown = [finding.location.line, *(r.location.line for r in finding.related)]  # type: ignore[union-attr]
    assert (8 if bounds == "range(4)" else 6) in shown


def test_ranks_in_loops_one_after_the_other(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=(RELAX, EPOCHS))
        tape.call("barrier", 14, inside=((12, "for k in range(1):"), EPOCHS))
    made[0].call(line=9, inside=(RELAX, EPOCHS), state=State.BEGUN, at=START + 5)
    after = ((12, "for k in range(1):"), EPOCHS)
    made[1].call("barrier", 14, inside=after, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "unexplained"
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize("began", [True, False])
def test_a_loop_that_a_rank_left_in_its_first_round(tmp_path: Path, began: bool) -> None:
    made = tapes()
    way = Way(line=11, text="if loss < limit:", first=13, last=13)
    loader = (Statement(line=8, text="for x, y in loader:", exits=(way,)), EPOCHS)
    after = ((22, "for x, y in held_out:"), EPOCHS)
    for tape in made.values():
        tape.call("DDP backward", 12, inside=loader)
        for _ in range(4):
            tape.call(line=23, inside=after)
    made[0].call("DDP backward", 12, inside=loader, state=State.BEGUN, at=START + 5)
    made[1].call(line=23, inside=after, state=State.BEGUN, at=START + 5)
    more = {
        0: left_early(epochs=2, exhausted=False),
        1: left_early(epochs=1 + began, exhausted=not began),
    }
    (finding,) = found(run_of(tmp_path, made, more=more, now=START + 7))
    assert finding.rule == "loop-exit"
    if began:
        assert (finding.ranks, str(finding.location)) == ((1,), "train.py:11")


def test_a_caller_that_is_not_on_record_may_be_in_the_loop(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=9, inside=NESTED)
    made[0].call(line=9, inside=NESTED, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    deep = made[1].events.pop()
    assert isinstance(deep, CallSite)
    made[1].events += [
        msgspec.structs.replace(e, function="helper") if isinstance(e, Site) else e
        for e in [made[1].events.pop()]
    ]
    made[1].events.append(msgspec.structs.replace(deep, places=deep.places * CALLERS))
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "unexplained"


def test_a_loop_that_the_others_left_when_it_was_entered_from_other_lines(tmp_path: Path) -> None:
    made = tapes()
    loop = ((8, "for meter in meters:"),)
    on_zero = {22: "if rank == 0:"}
    for tape in made.values():
        tape.call(line=9, inside=loop, caller=13)
    made[0].call(line=9, inside=loop, caller=22, branches=on_zero, state=State.BEGUN, at=START + 5)
    made[1].call("barrier", 14, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "branch"
    assert 8 not in [r.location.line for r in finding.related]


def test_a_loop_that_the_others_come_to_later(tmp_path: Path) -> None:
    made = tapes()
    loop = ((8, "for p in params:"),)
    made[0].call("broadcast", 20, inside=((19, "if rank == 0:"),), at=START + 5)
    made[0].call("all_gather", 9, inside=loop, caller=22, state=State.BEGUN, at=START + 6)
    made[1].call("all_gather", 9, inside=loop, caller=22, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == "branch"
