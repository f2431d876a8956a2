"""DDP602 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.collective_shape_mismatch import CollectiveShapeMismatch
from recordings import make_run, site
from tapes import START, CallLog, run_of, tapes

from ddpdoctor.events import (
    CommHook,
    Event,
    ExceptionRaised,
    FlatGradients,
    MessageSize,
    SentBuffers,
    SharedOutputs,
    StepDone,
    Tensor,
    Wrapped,
)
from ddpdoctor.report.findings import Finding, Steps
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import Phase, State


def found(run: Run) -> list[Finding]:
    return list(CollectiveShapeMismatch().examine(run))


def test_names_in_another_order(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for rank, tape in made.items():
        for name in ("weight", "bias") if rank else ("bias", "weight"):
            tape.call(line=9, key=name, numel=64 if name == "weight" else 8)
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "arguments"
    assert "sort the keys" in finding.fix


def left_out(numel: int, *missing: str, whole: int = 10) -> FlatGradients:
    return FlatGradients(at=0, numel=numel, whole=whole, missing=missing, step=1, site=-1)


@pytest.mark.parametrize(
    ("first", "second", "blamed"),
    [
        ((10,), (7, "tower.weight"), (1,)),
        ((6, "head.bias"), (7, "tower.weight"), (0, 1)),
        ((6, "frozen", "head.bias"), (9, "frozen"), (0,)),
        ((8,), (7, "tower.weight"), None),  # the other one has not all gradients either
        ((10,), (7,), None),
    ],
)
def test_a_flat_tensor_of_the_gradients_that_exist(
    tmp_path: Path,
    first: tuple[object, ...],
    second: tuple[object, ...],
    blamed: tuple[int, ...] | None,
) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for tape, (numel, *missing) in zip(made.values(), (first, second), strict=True):
        tape.call(line=9, numel=numel)  # type: ignore[arg-type]
        if missing:
            tape.events.append(left_out(numel, *missing))  # type: ignore[arg-type]
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == ("arguments" if blamed is None else "gradients-left-out")
    if blamed is not None:
        assert finding.ranks == blamed
        assert "frozen" not in finding.cause and "zeros_like" in finding.fix


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("numel", 3, "shapes"),
        ("dtype", "int32", "dtypes"),
        ("reduce_op", "MAX", "reduce operations"),
        ("device", "cuda", "devices"),
    ],
)
def test_one_rank_passes_something_else(
    tmp_path: Path, name: str, value: object, word: str
) -> None:
    made = {rank: CallLog(rank, 3) for rank in range(3)}
    for rank, tape in made.items():
        tape.call(line=9).call(line=9, **({name: value} if rank == 2 else {}))  # type: ignore[arg-type]
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "arguments"
    assert finding.ranks == (2,)
    assert finding.evidence["differs"] == [name]


@pytest.mark.parametrize(
    ("groups", "line", "faults"),
    [
        (((0, 1), (2, 3)), 9, 1),
        (((0, 1), (2, 3)), 10, 2),
        (((0, 1), (1, 2, 3)), 9, 2),
    ],
)
def test_the_same_fault_in_each_of_two_sub_groups(
    tmp_path: Path, groups: tuple[tuple[int, ...], ...], line: int, faults: int
) -> None:
    made = tapes(4)
    for number, ranks in enumerate(groups, 1):
        for rank in ranks:
            made[rank].group(number, str(number), ranks)
            culprits = {"numel": 3} if rank == ranks[-1] else {}
            at = 9 if number == 1 else line
            made[rank].call(line=at, group=number).call(line=at, group=number, **culprits)  # type: ignore[arg-type]
    told = found(run_of(tmp_path, made))
    assert len(told) == faults
    if faults == 1:
        assert told[0].ranks == (1, 3)
        same = [{"group": "group 2 [2, 3]", "call_number": 1, "ranks": "3"}]
        assert told[0].evidence["same_in"] == same


@pytest.mark.parametrize(("lasts", "other"), [(5.0, True), (0.01, False)])
def test_the_same_shapes_in_another_order(tmp_path: Path, lasts: float, other: bool) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for rank, tape in made.items():
        for n, numel in enumerate((3, 7, 7, 5) if rank == 0 else (5, 7, 7, 3)):
            at = START + 1 + n / 10
            tape.call(line=9, numel=numel, at=at, lasts=lasts)
    run = run_of(tmp_path, made)
    assert bool(found(run)) is not other
    orders = list(CollectiveMismatch().examine(run))
    assert bool(orders) is other
    if other:
        assert orders[0].ranks == (0, 1)


def test_of_two_ranks_the_one_that_changed_is_at_fault(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for rank, tape in made.items():
        tape.call(line=9)
        tape.call(line=9, reduce_op="MAX" if rank == 0 else "SUM")
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "arguments"
    assert finding.ranks == (0,)


@pytest.mark.parametrize(
    ("before", "roots", "ranks"),
    [
        ((), (0, 1), (0, 1)),
        ((0, 2), (0, 1, 2), (0, 1, 2)),
        ((0,), (1, 0, 0), (0,)),
        ((0,), (0, 0, 1, 2), (2, 3)),
        ((0,), (0, 0, 1, 2, 3), (0, 1, 2, 3, 4)),
        ((0,), (0, 0, 0), None),
    ],
)
def test_who_is_at_fault_of_many_roots(
    tmp_path: Path, before: tuple[int, ...], roots: tuple[int, ...], ranks: tuple[int, ...] | None
) -> None:
    made = tapes(len(roots))
    for rank, tape in made.items():
        for root in (*before, roots[rank]):
            tape.call("broadcast", 9, numel=4, dtype="float32", root=root)
    told = found(run_of(tmp_path, made))
    assert [f.ranks for f in told] == ([ranks] if ranks else [])


@pytest.mark.parametrize("op", ["broadcast", "all_reduce"])
def test_what_is_received_has_the_dtype_of_what_is_sent(op: str, tmp_path: Path) -> None:
    made = tapes()
    root = {"root": 1} if op == "broadcast" else {}
    for rank, tape in made.items():
        tape.call(op, 9, numel=4, dtype="uint8" if rank else "float32", **root)
    (finding,) = found(run_of(tmp_path, made))
    sent = "receive into a tensor of the dtype that rank 1 sends: `dtype=torch.uint8`"
    assert (finding.fix == sent) is (op == "broadcast")


def test_sizes_that_may_differ(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for rank, tape in made.items():
        tape.call("all_gather_object", 5).call("all_to_all_single", 6, numel=-1, dtype="float32")
        tape.call(line=7, numel=6, shape=(6,) if rank else (2, 3))
        tape.call("send" if rank else "recv", 8, peer=1 - rank, numel=-1)
    assert found(run_of(tmp_path, made)) == []


def test_another_order_is_told_by_the_other_check(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call(line=8, text="r(a)", numel=3).call(line=9, text="r(b)")
    made[1].call(line=9, text="r(b)").call(line=8, text="r(a)", numel=3)
    assert found(run_of(tmp_path, made)) == []


@pytest.mark.parametrize(
    ("state", "names", "ranks"),
    [
        (State.FAILED, ("fp16", ""), (0,)),
        (State.FAILED, ("", "", "fp16"), (2,)),
        (State.FAILED, ("fp16", "", "fp16"), (1,)),
        (State.FAILED, ("fp16", "fp16"), None),
        (State.DONE, ("fp16", ""), None),
    ],
)
def test_communication_hooks_that_differ(
    tmp_path: Path, state: State, names: tuple[str, ...], ranks: tuple[int, ...] | None
) -> None:
    world = len(names)
    made = {rank: CallLog(rank, world) for rank in range(world)}
    more: dict[int, list[Event]] = {}
    for rank, tape in made.items():
        tape.call("DDP backward", 28, state=state, at=START + 5, lasts=1)
        more[rank] = [
            Wrapped(at=START, model=0, wrapper="DistributedDataParallel", kind="Net", group=0,
                    site=-1),
            site(70, "train.py", 9, "register_comm_hook"),
        ]  # fmt: skip
        if names[rank]:
            more[rank].append(CommHook(at=START, model=0, name=names[rank], site=70))
    if state is State.FAILED:
        more[0].append(ExceptionRaised(at=START + 6.01, kind="RuntimeError", message="boom"))
    told = found(run_of(tmp_path, made, more=more))
    assert [f.ranks for f in told] == ([ranks] if ranks else [])
    for finding in told:
        assert finding.location is not None
        assert finding.location.line == 9


def mask(size: int, *, ignored: bool = False) -> Tensor:
    return Tensor("mask", (size, size), "bool", False, ignored)


@pytest.mark.parametrize(
    ("sent", "steps", "ranks"),
    [
        (((12, 0), (13, 0)), 9, (1,)),
        (((12, 0), (12, 0)), 9, None),
        (((12, 2), (13, 4)), 9, (1,)),
        (((12, 2), (12, 4)), 9, (1,)),
        (((12, 4), (4, 4)), 4, None),
        (((4, 4), (12, 4)), 5, (1,)),
    ],
)
def test_buffers_that_grow_with_the_ranks_own_batch(
    tmp_path: Path, sent: tuple[tuple[int, int], ...], steps: int, ranks: tuple[int, ...] | None
) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    more: dict[int, list[Event]] = {}
    for rank, (size, step) in enumerate(sent):
        more[rank] = [
            Wrapped(at=START, model=0, wrapper="DistributedDataParallel", kind="Net", group=0,
                    site=-1, buffers=(mask(4), Tensor("own", (rank,), "int64", False, True))),
            site(70, "train.py", 9, "out = model(x)"),
            SentBuffers(at=START + 2, model=0, forward=step, step=step, total=step, site=70,
                        buffers=(mask(size),)),
            StepDone(at=START + 9, optimizer=0, step=steps - 1, site=-1, wall_s=0.1),
        ]  # fmt: skip
    told = found(run_of(tmp_path, made, more=more))
    assert [f.ranks for f in told] == ([ranks] if ranks else [])
    for finding in told:
        assert finding.location is not None
        assert finding.location.line == 9
        assert finding.subjects == ("mask",)


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("has", [0, 1])
def test_buffers_that_only_some_ranks_have(tmp_path: Path, crashed: bool, has: int) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    more: dict[int, list[Event]] = {}
    for rank in range(2):
        more[rank] = [
            Wrapped(at=START, model=0, wrapper="DistributedDataParallel", kind="Net", group=0,
                    site=-1, buffers=(mask(4),)),
            site(70, "train.py", 9, "out = model(x)"),
            site(71, "train.py", 4, "self.rotary = Rotary()"),
            StepDone(at=START + 9, optimizer=0, step=0 if crashed else 8, site=-1, wall_s=0.1),
        ]  # fmt: skip
        late = Tensor("rotary.frequencies", (16,), "float32", False, False)
        for step in (1, 4):
            if (rank == has) is (step == 1) and not (crashed and step == 4):
                more[rank].append(
                    SentBuffers(at=START + 2, model=0, forward=step, step=step, total=step,
                                site=70, buffers=(mask(4), late), made=71)
                )  # fmt: skip
        # In a crash one died in that forward, the other left after the error that it got.
        made[rank].call(line=9, step=1)
        made[rank].now(Phase.LEAVING if rank == has or not crashed else Phase.FORWARD)
    (finding,) = found(run_of(tmp_path, made, more=more))
    assert finding.ranks == (1 - has,)
    assert f"rank {1 - has} has no rotary.frequencies" in finding.summary
    assert finding.steps == Steps(1, 1 if crashed else 3, 1 if crashed else 3)
    assert [r.location.line for r in finding.related] == [4]
    assert "`__init__`" in finding.fix


def _message(rank: int, peer: int, numel: int, dtype: str = "float32", *, sends: bool) -> Event:
    size = {"float32": 4, "float16": 2, "uint8": 1}[dtype]
    return MessageSize(
        at=START + 1, sends=sends, peer=peer, group=0, numel=numel, dtype=dtype,
        bytes=numel * size, step=0, site=900 + rank,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "received", "completed", "finds"),
    [
        ([(8, "float32")], [(32, "float32")], True, "rest keeps its old values"),
        ([(8, "float32")], [(8, "float32")], True, None),
        ([(32, "float32")], [(8, "float32")], False, "does not fit"),
        ([(8, "float32")], [(8, "float16")], True, "another type"),
        # plain memory
        ([(8, "float32")], [(32, "uint8")], True, None),
        # the last one may not have been received yet
        ([(32, "float32"), (8, "float32")], [(32, "float32")], False, None),
        ([(32, "float32"), (8, "float32")], [(32, "float32")], True, "rest keeps its old values"),
        ([(32, "float32"), (8, "float32")], [(8, "float32"), (32, "float32")], True, None),
        ([(8, "float32")], [], True, None),
    ],
)
def test_sizes_of_messages(
    tmp_path: Path,
    sent: list[tuple[int, str]],
    received: list[tuple[int, str]],
    completed: bool,
    finds: str | None,
) -> None:
    more = {
        0: [site(900, "train.py", 7, "send(x)"), *(_message(0, 1, *s, sends=True) for s in sent)],
        1: [
            site(901, "train.py", 9, "recv(y)"),
            *(_message(1, 0, *s, sends=False) for s in received),
        ],
    }
    made = {rank: CallLog(rank, 2).call(line=3) for rank in range(2)}
    ended = {0: 0, 1: 0} if completed else {0: -6, 1: -15}
    findings = found(run_of(tmp_path, made, more=more, ended=ended))
    assert [f.rule for f in findings] == ["message-sizes"] * (finds is not None)
    if finds is not None:
        assert finds in findings[0].cause
        assert findings[0].location is not None
        assert findings[0].location.line == 7


def test_a_message_that_any_rank_may_have_sent(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=3) for rank in range(2)}
    received = [_message(1, peer, 32, sends=False) for peer in (0, -1)]
    more = {0: [_message(0, 1, 8, sends=True)], 1: received}
    assert found(run_of(tmp_path, made, more=more, ended={0: 0, 1: 0})) == []


@pytest.mark.parametrize(("made_site", "distinct"), [(1, 1), (-1, 2)])
def test_outputs_that_are_one_tensor(made_site: int, distinct: int) -> None:
    event = SharedOutputs(
        at=0, op="all_gather", site=2, outputs=4, distinct=distinct, made_site=made_site
    )
    lines = [site(1, "train.py", 8, "outs = [x] * 4"), site(2, "train.py", 9, "gather(outs)")]
    (finding,) = found(make_run({rank: [*lines, event] for rank in range(2)}))
    assert (finding.rule, finding.ranks) == ("shared-outputs", (0, 1))
    assert str(finding.location) == ("train.py:8" if made_site > 0 else "train.py:9")
    assert bool(finding.related) is (made_site > 0)


def test_a_loop_over_a_set(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    loop = (8, "for dtype in {g.dtype for g in grads}:")
    for rank, tape in made.items():
        for dtype in ("float32", "bfloat16")[:: -1 if rank else 1]:
            tape.call(line=9, dtype=dtype, inside=[loop])
    (finding,) = found(run_of(tmp_path, made))
    assert finding.rule == "arguments"
    assert "goes through a set" in finding.cause
    assert finding.fix.startswith("go through it in an order that is the same on all ranks")
