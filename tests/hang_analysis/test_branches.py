"""DDP601 where a branch of the program parts the ranks, and where it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from msgspec.structs import replace
from recordings import site
from tapes import START, run_of, tapes

from ddpdoctor.analysis.control_flow.branches import condition, unbranched
from ddpdoctor.events import CallSite, Place, Site, Statement, Wrapped
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

ON_ZERO = ((7, "if rank == 0:"),)


def found(run: Run) -> list[Finding]:
    return list(CollectiveMismatch().examine(run))


@pytest.mark.parametrize(("line", "certain"), [(12, True), (6, False)])
def test_a_branch_whose_text_names_no_rank(tmp_path: Path, line: int, certain: bool) -> None:
    made = tapes()
    branch = ((7, "if boss:"),)
    made[0].call(line=8, numel=1, inside=branch, state=State.BEGUN)
    made[1].call("barrier", line, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("branch" if certain else "unexplained")
    assert finding.ranks == (0,)
    assert 7 in [r.location.line for r in finding.related]
    assert "step" not in finding.evidence["calls"][0]  # type: ignore[index]


def test_another_line_that_reads_the_same_is_another_call(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call("barrier", 5, "dist.barrier()")
    made[0].call("barrier", 8, "dist.barrier()", inside=((7, "if boss:"),), state=State.BEGUN)
    made[1].call("all_reduce", 12, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert (finding.rule, finding.ranks) == ("branch", (0,))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("if fabric.is_global_zero:", True),
        ('if mode == "a" and os.environ["LOCAL_RANK"] == "0":', True),
        ('if cfg["dist"]["rank"] == 0:', True),
        ("if os.environ.get('RANK', '0') == '0':", True),
        ('if mode == "rank0reduce":', False),
        ("if mode in ('rank0', 'rank1') and it % 2:", False),
    ],
)
def test_a_branch_whose_text_names_a_rank(tmp_path: Path, text: str, names: bool) -> None:
    made = tapes()
    around = ((8, "if it % 3 == 0:" if names else "if boss:"), (7, text))
    around = around[::-1] if names else around
    made[0].call(line=9, text="log(loss)", inside=around, state=State.BEGUN)
    made[1].call("barrier", 12, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("if world_size > 1:", False),
        ("if dist.is_available() and torch.distributed.is_initialized():", False),
        ("if not is_dist_avail_and_initialized():", False),
        ('if int(os.environ.get("WORLD_SIZE", "1")) > 1:', False),
        ("else:  # if self.world_size < 2:", False),
        ("if args.local_rank != -1:", False),
        ("if opt.rank >= 0:", False),
        ("if not cfg.train.amp:", False),
        ("else:  # if args.amp:", False),
        ("if args.local_rank != 1:", True),
        ("if args.amp and boss:", True),
        ("if dist.get_world_size(group) > 1:", True),
        ("if world_size > 1 and boss:", True),
        ("if torch.cuda.is_available():", True),
        ("else:", True),
        ("except RuntimeError:", True),
    ],
)
def test_whether_there_are_several_ranks_parts_nobody(
    tmp_path: Path, text: str, parts: bool
) -> None:
    made = tapes()
    helper, boss = (Statement(line=7, text=text),), (Statement(line=67, text="if boss:"),)
    made[0].call(line=8, inside=helper, caller=68, state=State.BEGUN)
    call = made[0].events.pop()
    assert isinstance(call, CallSite)
    inside, outside = call.places
    made[0].events.append(replace(call, places=(inside, replace(outside, inside=boss))))
    made[1].call("barrier", 57, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert [r.location.line for r in finding.related if "branch" in r.label] == [7 if parts else 67]


@pytest.mark.parametrize("expression", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_the_wrapped_model_under_a_branch_that_another_rank_is_past(
    tmp_path: Path, zero: int, expression: bool
) -> None:
    made = tapes()
    branch = (Statement(line=7, text="if R == 0:"),)
    tape = made[zero].call("DDP forward", 8, "loss = sum(model(x) for x in loader)", inside=branch)
    if expression:  # a generator expression is a function of its own, called by the other
        call, line = tape.events.pop(), tape.events[-1]
        assert isinstance(call, CallSite)
        assert isinstance(line, Site)
        tape.events += [
            replace(line, id=50, function="<genexpr>"),
            replace(call, places=(Place(site=50, inside=branch), *call.places)),
        ]
    made[1 - zero].call("barrier", 12)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert (finding.ranks, str(finding.location)) == ((zero,), "train.py:8")


@pytest.mark.parametrize(("text", "wraps", "told"), [
    ("loss = ddp_net(x)", ("ddp_net = DDP(net)",), "`ddp_net.module(...)`"),
    ("loss = self.ddp(x)", ("self.ddp = DDP(net)",), "`self.ddp.module(...)`"),
    ("loss = model(x)", ("ddp_net = DDP(net)",), "`model.module(...)`"),
    ("loss = net(x)", ("ddp_net = DDP(net)",), "the module in it (`.module`)"),
    ("loss = d(g(z))", ("g = DDP(g)", "d = DDP(d)"), "the module in it (`.module`)"),
    ("loss = g(z)", ("g = DDP(g)", "d = DDP(d)"), "`g.module(...)`"),
    ("loss = (x)", ("wrap(net)",), "the module in it (`.module`)"),
])  # fmt: skip
def test_the_advice_names_the_wrapper_as_the_program_does(
    tmp_path: Path, text: str, wraps: tuple[str, ...], told: str
) -> None:
    made = tapes()
    made[0].call("DDP forward", 8, text, inside=(Statement(line=7, text="if R == 0:"),))
    for n, wrap in enumerate(wraps):
        made[0].events += [
            site(90 + n, "train.py", 2 + n, wrap),
            Wrapped(at=START, model=n, wrapper="DistributedDataParallel", kind="Net", group=0,
                    site=90 + n),
        ]  # fmt: skip
    made[1].call("barrier", 12)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"


@pytest.mark.parametrize(
    ("line", "around", "told"), [(45, "", True), (45, "if late:", False), (41, "", False)]
)
def test_a_branch_in_a_function_that_the_other_is_back_from(
    tmp_path: Path, line: int, around: str, told: bool
) -> None:
    made = tapes()
    vote = ((15, "if loss > self.factor * mean:"),)
    made[0].call("barrier", 5, caller=line, state=State.BEGUN)
    made[1].call(
        line=17, inside=vote, caller=42, branches={42: around} if around else None,
        state=State.BEGUN,
    )  # fmt: skip
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("branch" if told else "unexplained")
    if told:
        assert (finding.ranks, str(finding.location)) == ((1,), "train.py:17")


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_call_of_an_object_that_is_collected(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    made = tapes()
    for rank, tape in made.items():
        collected = rank in ranks
        op = "all_reduce" if rank else "barrier"
        inside = ((35, "if rank == 1 and i == 20:"),) if rank else ()
        tape.call(op, 18 - rank, inside=inside, state=State.BEGUN)
        tape.events = [
            replace(e, function="__del__") if isinstance(e, Site) and collected else e
            for e in tape.events
        ]
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("finalizer" if len(ranks) == 1 else "branch")


def test_a_call_after_a_statement_by_which_other_ranks_leave(tmp_path: Path) -> None:
    made = tapes()
    past = (Statement(line=7, text="past if rank != 0:", opener=6),)
    made[0].call(line=9, text="log(loss)", inside=past, state=State.BEGUN)
    made[1].call("barrier", 12, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.ranks == (0,)
    (there, _) = finding.related
    assert (there.location.line, there.location.source) == (6, "if rank != 0:")


def test_a_call_in_the_body_that_leaves_is_the_other_arm(tmp_path: Path) -> None:
    made = tapes()
    body = (Statement(line=6, text="if rank != 0:"),)
    past = (Statement(line=8, text="past if rank != 0:", opener=6),)
    for _ in range(3):
        made[0].call(line=9, text="broadcast(x, 0)", inside=past)
        made[1].call(line=7, text="broadcast(y, 0)", inside=body)
    assert found(run_of(tmp_path, made)) == []


@pytest.mark.parametrize("text", ['if __name__ == "__main__":', "if rank in members:"])
def test_a_branch_that_all_ranks_are_in(tmp_path: Path, text: str) -> None:
    made = tapes()
    made[0].call(line=8, numel=1, inside=((7, text),), state=State.BEGUN)
    made[1].call("barrier", 10, inside=((7, text),), state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "unexplained"
    assert 7 not in [r.location.line for r in finding.related]


@pytest.mark.parametrize(("opener", "opposed"), [(5, True), (18, False)])
def test_both_arms_of_one_branch_make_calls(tmp_path: Path, opener: int, opposed: bool) -> None:
    made = tapes()
    other = (Statement(line=20, text="else:  # if rank == 0:", opener=opener),)
    made[0].call("barrier", 6, inside=((5, "if rank == 0:"),), state=State.BEGUN)
    made[1].call(line=21, numel=1, inside=other, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("opposite-branches" if opposed else "branch")


def test_swap_inside_the_arms_of_one_branch(tmp_path: Path) -> None:
    made = tapes()
    one, other = ((5, "if rank == 0:"),), ((8, "else:  # if rank == 0:"),)
    made[0].call(line=6, text="r(a)", inside=one).call(line=7, text="r(b)", inside=one)
    made[1].call(line=9, text="r(b)", inside=other).call(line=10, text="r(a)", inside=other)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert finding.ranks == (0,)


def test_two_lines_for_one_broadcast(tmp_path: Path) -> None:
    made = tapes()
    for _ in range(4):
        made[0].call("broadcast", 8, "broadcast(x)", numel=4, dtype="float32", root=0)
        made[1].call("broadcast", 10, "broadcast(y)", numel=4, dtype="float32", root=0)
        for tape in made.values():
            tape.call(line=12)
    assert found(run_of(tmp_path, made)) == []


def test_arms_that_ranks_take_in_turn(tmp_path: Path) -> None:
    made = tapes()
    for step in range(8):
        for rank, tape in made.items():
            if (step + rank) % 3:
                tape.call(line=6, text="r(x)", inside=((5, "if has_data:"),))
            else:
                tape.call(line=8, text="r(zeros)", inside=((7, "else:  # if has_data:"),))
            tape.call("barrier", 9)
    assert found(run_of(tmp_path, made)) == []


def test_arms_of_two_branches_are_no_alternatives(tmp_path: Path) -> None:
    made = tapes()
    for tape in made.values():
        tape.call(line=6, text="r(grad)", inside=((5, "if not skip():"),), numel=64)
        tape.call(line=10, text="r(loss)", inside=((9, "else:  # if swapped(x):"),), numel=1)
    made[1].call(line=6, text="r(grad)", numel=64, inside=((5, "if not skip():"),))
    made[0].call(line=10, text="r(loss)", numel=1, inside=((9, "else:  # if swapped(x):"),))
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "unexplained"
    assert finding.evidence["differs"] == ["numel"]


def test_the_guard_of_the_script_parts_nobody(tmp_path: Path) -> None:
    made = tapes()
    guard = ((30, 'if __name__ == "__main__":'),)
    made[0].call("barrier", 8, inside=guard, state=State.BEGUN)
    made[1].call(line=10, state=State.BEGUN)  # its callers are cut off
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "unexplained"
    assert 30 not in [r.location.line for r in finding.related]


@pytest.mark.parametrize("line", [12, 6])
def test_a_call_of_one_group_under_a_branch_that_the_others_are_past(
    tmp_path: Path, line: int
) -> None:
    made = tapes(3)
    branch = ((7, "if epoch == 1 and rank == 0:"),)
    for rank, tape in made.items():
        tape.group(1, "1", (0, 1, 2))
        if rank == 0:
            tape.call("broadcast", 8, inside=branch, state=State.BEGUN, at=START + 5)
        else:
            tape.call(line=line, group=1, state=State.BEGUN, at=START + 5)
    (finding,) = found(run_of(tmp_path, made, now=START + 7))
    assert finding.rule == ("branch" if line > 7 else "group-order")
    assert finding.ranks == ((0,) if line > 7 else (0, 1, 2))
    assert str(finding.location) == "train.py:8"
    if line > 7:
        assert finding.evidence["waiting"][1]["ranks"] == "1-2"  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("if step and step % n == 0 and is_main():", "under `if step and step % n == 0:`"),
        ("if rank == 0 and (a or b): save()", "under `if (a or b):`"),
        ("past if step % n or rank != 0: return", "past `if step % n:`"),
        ("if step % n == 0 or is_main():", "move it out of"),
        ("past if step % n and rank != 0:", "move it before"),
        ("if rank == 0 and local_rank == 0:", "move it out of"),
        ("if step % n == 0 and late(step):", "move it out of"),
        ("if (step % n == 0 and", "move it out of"),
        ("elif late and rank == 0:  # if rank == 1 and early:", "move it out of"),
    ],
)  # fmt: skip
def test_a_call_is_to_be_made_without_the_part_on_the_rank(text: str, told: str) -> None:
    assert told in unbranched(Statement(line=7, text=text), "call barrier")


def test_the_rest_of_the_condition_is_to_be_the_same_on_all() -> None:
    head = Statement(line=7, text="if step % n == 0 and is_main():")
    told = unbranched(head, "call barrier")
    assert "under `if step % n == 0:`" in told and told.endswith("under `is_main()`")


@pytest.mark.parametrize("rest", ["writer is not None", "writer.due()", "flags[0]"])
def test_a_condition_that_does_not_hold_or_raises_on_other_ranks_is_not_kept(rest: str) -> None:
    head = Statement(line=7, text=f"if rank == 0 and {rest}:")
    assert unbranched(head, "call barrier") == (
        f"call barrier on every rank: move it out of `if rank == 0 and {rest}:`"
    )


@pytest.mark.parametrize("matched", [True, False])
def test_a_branch_whose_other_arm_makes_the_same_call_parts_nobody(
    tmp_path: Path, matched: bool
) -> None:
    made = tapes()
    inner = (Statement(line=7, text="if rank == 0:", matched=matched),)
    outer = {15: "if is_main_process():"}
    made[0].call("broadcast", 8, inside=inner, caller=15, branches=outer, state=State.BEGUN)
    made[1].call("barrier", 20, state=State.BEGUN)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "branch"
    assert (14 if matched else 7) in [r.location.line for r in finding.related]


def test_two_arms_that_make_the_same_call_say_nothing() -> None:
    one = CallSite(at=0, id=0, places=(
        Place(5, (Statement(line=7, text="else:  # if rank == 0:", matched=True),)),
    ))  # fmt: skip
    made: Any = SimpleNamespace(site=one)
    assert condition(made) is None


def test_what_must_move_along_with_a_call() -> None:
    head = Statement(line=7, text="if rank == 0 and due:", kind="if", test="rank == 0 and due",
                     fed=("metric",))  # fmt: skip
    assert unbranched(head, "call all_gather") == (
        "call all_gather on every rank, under `if due:` without `rank == 0`, together with the "
        "other lines of the block that use `metric`"
    )
    head = Statement(line=7, text="if rank == 0:", kind="if", test="rank == 0", fed=("a", "b"))
    assert unbranched(head, "call all_gather").endswith(
        "move it out of `if rank == 0:`, together with the other lines of the block that use `a` "
        "and `b`"
    )
