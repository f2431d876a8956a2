"""DDP402 and DDP403 of modules outside of the wrapper, on literal events."""

import pytest
from ddpdoctor.checks.drift.buffer_drift import BufferDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from replicas import LINE, OTHER, digests, run_of

from ddpdoctor.events import (
    EpochEnded,
    FileWritten,
    OuterDigests,
    OuterModule,
    OuterStateTaken,
    Place,
    Statement,
    Tensor,
    Wrapped,
)
from ddpdoctor.events.drift import AT_END, AT_START
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Severity, Steps


def module(*names, parameters=0, **more):
    shapes = tuple((2,) for _ in names)
    fields = {"at": 0, "number": 0, "kind": "Target", "site": LINE, "call_site": LINE, "step": 3}
    return OuterModule(**fields, names=names, shapes=shapes, parameters=parameters, **more)


def seen(step, *values, queues=(), update=()):
    fields = {"at": step, "module": 0, "optimizer": 0, "step": step}
    return OuterDigests(**fields, values=pack(values), queues=queues, update=update)


def judged(*ranks):
    run = run_of(dict(enumerate(ranks)))
    return [*ParameterDrift().examine(run), *BufferDrift().examine(run)]


def copy_of_encoder(**more):
    return module("w", "mean", parameters=1, like=(0, "encoder"), **more)


@pytest.mark.parametrize(
    ("like", "severity"), [((0, "encoder"), Severity.ERROR), (None, Severity.WARNING)]
)
def test_parameters(like, severity):
    target = module("w", "mean", parameters=1, like=like)
    ranks = [[target, seen(4, 1 + n, 5), seen(9, 1 + n, 6)] for n in range(2)]
    (found,) = judged(*ranks)
    assert (found.code, found.severity, found.subjects) == ("DDP402", severity, ("w",))
    assert found.steps == Steps(4, 9, 2, compared=2)


def test_a_copy_of_parameters_that_ddp_ignores():
    """The model has them apart on each rank on purpose; its copy follows."""

    def rank(n, ignored):
        tensor = Tensor(name="encoder.w", shape=(2,), dtype="float32", ignored=ignored)
        other = Tensor(name="encoder.v", shape=(2,), dtype="float32")
        kind = {"wrapper": "DistributedDataParallel", "kind": "Net", "group": 0, "site": LINE}
        wrapped = Wrapped(at=0, model=1, parameters=(tensor, other), **kind)
        copied = module("w", "v", parameters=2, like=(1, "encoder"))
        return [wrapped, copied, seen(4, 1 + n, 5), seen(9, 1 + n, 6)]

    assert judged(*(rank(n, True) for n in range(2))) == []
    (found,) = judged(*(rank(n, False) for n in range(2)))
    assert found.subjects == ("w",)


def test_a_copy_from_before_the_wrap_and_one_that_is_updated_differently():
    target = copy_of_encoder(copied=True, made_at=-5.0)
    (found,) = judged(*([target, seen(AT_START, 1 + n, 5), seen(4, 3 + n, 5)] for n in range(2)))
    assert "before the wrap" in found.cause and "different values" not in found.cause
    assert found.steps.first == 0
    assert "copy.deepcopy(model.module.encoder)" in found.fix
    (found,) = judged(*([target, seen(4, 1, 5), seen(9, n, 5)] for n in range(2)))
    assert "different values" in found.cause and "before the wrap" not in found.cause
    assert found.steps.first == 9


def test_it_is_not_known_whether_a_copy_differed_at_the_start():
    (found,) = judged(*([copy_of_encoder(copied=True), seen(4, 1 + n, 5)] for n in range(2)))
    assert "or the ranks update it" in found.cause


@pytest.mark.parametrize(
    ("looks", "updating"),
    [
        ([[(1, 5), (2, 5), (3, 5)], [(1, 5), (1, 5), (1, 5)]], True),
        ([[(1, 5), (2, 5), (2, 5)], [(1, 5), (1, 5), (4, 5)]], False),
        ([[(1, 5), (2, 5)], [(1, 5), (1, 5)]], False),  # too few looks
        ([[(2, 5), (3, 5), (4, 5)], [(1, 5), (1, 5), (1, 5)]], False),  # differed at the start
    ],
)
def test_a_copy_that_one_rank_alone_updates(looks, updating):
    target = copy_of_encoder(copied=True)
    steps = (AT_START, 4, AT_END)
    (found,) = judged(*([target, *map(seen, steps, *zip(*rank, strict=True))] for rank in looks))
    assert ("rank 0 updates it" in found.cause) is updating
    assert ("on every rank, or send it" in found.fix) is updating


@pytest.mark.parametrize(
    ("text", "updating", "told"),
    [
        ("if rank == 0:", True, True),
        ("if writer is not None:", True, True),
        ("if step % 2:", True, False),
        ("if rank == 0:", False, False),
    ],
)
def test_the_line_that_one_rank_alone_runs_to_update_it(text, updating, told):
    update = (Place(OTHER, (Statement(line=34, text=text),)),)
    steps = (AT_START, 4, AT_END)
    mine, theirs = [(1, 5), (2, 5), (3, 5)], [(1, 5), *([(1, 5)] if updating else [(4, 5)]), (1, 5)]
    ranks = [
        [
            copy_of_encoder(copied=True),
            seen(AT_START, 1, 5),
            *(
                seen(s, *v, update=update * (s == 4))
                for s, v in zip(steps[1:], rows[1:], strict=True)
            ),
        ]
        for rows in (mine, theirs)
    ]
    (found,) = judged(*ranks)
    assert found.location.line == (35 if told else 33)
    assert (34 in [r.location.line for r in found.related]) is told
    assert (f"rank 0 updates it under `{text}`" in found.cause) is told
    assert ("run this line on every rank" in found.fix) is told


@pytest.mark.parametrize(
    ("flags", "severity"),
    [({"learning": True}, Severity.WARNING), ({"feeds": True}, Severity.NOTE), ({}, None)],
)
def test_buffers(flags, severity):
    ranks = [[module("mean", **flags), seen(4, n), seen(-1, n + 5)] for n in range(2)]
    found = judged(*ranks)
    assert [(f.code, f.severity) for f in found] == [("DDP403", severity)] * (severity is not None)


def test_buffers_that_are_saved():
    ranks = [[module("mean"), seen(4, n), seen(-1, n + 5)] for n in range(2)]
    ranks[0].append(OuterStateTaken(at=7, module=0, step=9, site=LINE))
    assert judged(*ranks) == []
    ranks[0].append(FileWritten(at=8, path="/x/a.pt", site=LINE, step=9, how="save"))
    (found,) = judged(*ranks)
    assert found.severity is Severity.WARNING
    assert "its state is taken here" in [one.label for one in found.related]


@pytest.mark.parametrize(
    ("evaluations", "shares", "severity"),
    [
        ([], True, Severity.NOTE),
        ([(16, True)], True, Severity.WARNING),
        ([(16, True)], False, Severity.NOTE),
        ([(16, False), (32, True)], True, Severity.WARNING),
        ([(16, False), (32, False)], True, None),
    ],
)
def test_copies_of_the_model_that_all_ranks_evaluate(evaluations, shares, severity):
    ranks = [
        [copy_of_encoder(evaluated=True), seen(9, 1, n), seen(49, 1, n + 5)]
        + [
            OuterDigests(
                at=step, module=0, optimizer=0, step=step, evaluated=True,
                values=pack((1, step + n * differs)),
            )
            for step, differs in evaluations
        ]
        + [
            EpochEnded(
                at=50, loader=1, epoch=0, batches=2, samples=8, backwards=0, grad_enabled=False,
                exhausted=True, order=7 + n * shares,
            )
        ]
        for n in range(2)
    ]  # fmt: skip
    found = judged(*ranks)
    assert [(f.code, f.severity) for f in found] == [("DDP403", severity)] * (severity is not None)
    assert all(("evaluations compared" in f.summary) is bool(evaluations) for f in found)


def test_a_copy_that_one_rank_evaluates():
    ranks = [[copy_of_encoder(evaluated=True), seen(9, 1, n)] for n in range(2)]
    one = OuterDigests(at=1, module=0, optimizer=0, step=16, evaluated=True, values=pack((1, 2)))
    ranks[0].append(one)
    (found,) = judged(*ranks)
    assert found.severity is Severity.NOTE


def test_buffers_that_every_rank_saves_are_its_own():
    ranks = [[module("mean", learning=True), seen(4, n), seen(-1, n + 5)] for n in range(2)]
    for number, events in enumerate(ranks):
        events.append(OuterStateTaken(at=7, module=0, step=9, site=LINE))
        events.append(FileWritten(at=8, path=f"/x/{number}.pt", site=LINE, step=9, how="save"))
    assert judged(*ranks) == []


@pytest.mark.parametrize(("names", "severity"), [((), Severity.WARNING), ((0,), Severity.NOTE)])
def test_queues_that_each_rank_fills_by_itself(names, severity):
    bank = module("queue", learning=True)
    ranks = [[bank, seen(4, n), seen(5, n + 5, queues=names)] for n in range(2)]
    (found,) = judged(*ranks)
    assert found.severity is severity
    assert ("its own queue" in found.cause) is (names == (0,))


def test_silent():
    target = copy_of_encoder()
    equal = [[target, seen(4, 1, 5), seen(-1, 2, 6)] for _ in range(2)]
    assert judged(*equal) == []
    again = [[target, seen(4, 1 + n, 5), seen(-1, 2, 6)] for n in range(2)]
    assert judged(*again) == []
    one_rank_only = [[target, seen(4, 1, 5)], []]
    assert judged(*one_rank_only) == []
    other_shapes = [
        [target, seen(4, 1, 5)],
        [module("w", "v", "mean", parameters=2), seen(4, 2, 3, 5)],
    ]
    assert judged(*other_shapes) == []


def test_the_wrapped_model_itself_differs():
    drifting = [digests("parameters", {1: [1, 2, 3, n]}) for n in range(2)]
    ranks = [[drifting[n], copy_of_encoder(), seen(4, 1 + n, 5)] for n in range(2)]
    assert ["outside-the-wrapper" in f.rule for f in judged(*ranks)] == [False]
