"""uneven-batches: told before the hang, explained after it, silent where it does no harm."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import msgspec
import pytest
from ddpdoctor.checks.data.uneven_batches import UnevenBatches
from readers import found, loader, prologue, run_of
from recordings import make_run, steps

from ddpdoctor.events import (
    EpochBegan,
    EpochEnded,
    Event,
    ExceptionPassed,
    ExceptionRaised,
    Hyperparameters,
    OptimizerSeen,
    StepDone,
    Wrapped,
)
from ddpdoctor.report.errors import error_kinds
from ddpdoctor.report.findings import Confidence, Finding, Severity, Steps
from ddpdoctor.run import Phase, Rank

FAILED = {0: 1, 1: 0}


def part(count: int, *, ended: bool = True, **more: object) -> list[Event]:
    return loader(0, [list(range(count))], ended=ended, planned=True, **more)  # type: ignore[arg-type]


def examine(*ranks: Sequence[Event], ended: dict[int, int | None] | None = None) -> list[Finding]:
    return found(UnevenBatches(), run_of(*ranks, ended=FAILED if ended is None else ended))


def test_lengths_that_differ_are_told_before_the_hang() -> None:
    (finding,) = examine(part(36, ended=False), part(24, ended=False), ended={0: None, 1: None})
    assert finding.confidence is Confidence.SUSPECTED


def test_the_fix_in_the_words_of_the_framework_that_runs_the_loop() -> None:
    parts = [part(36, ended=False, length=36), part(24, length=24)]
    (finding,) = examine(*parts)
    assert "Join" in finding.fix
    for kind in ("SGD", "AdamW"):  # whose state would differ
        held = OptimizerSeen(at=0, optimizer=0, kind=kind, site=-1)
        (finding,) = examine(*([held, *p] for p in parts))
        assert ("Join" in finding.fix) is (kind == "SGD")
    momentum = Hyperparameters(at=0, optimizer=0, step=0, groups=({"momentum": 0.9},))
    (finding,) = examine(*([momentum, *p] for p in parts))
    assert "Join" not in finding.fix
    made = Wrapped(at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=0,
                   site=-1, by="lightning.pytorch.trainer.trainer")  # fmt: skip
    ranks = {r: [*prologue(2, wrapped=False), made, *p] for r, p in enumerate(parts)}
    (finding,) = UnevenBatches().examine(make_run(ranks, ended=FAILED))
    assert "`Trainer(limit_train_batches=N)`" in finding.fix
    assert "Join" not in finding.fix


def test_a_rank_that_counts_its_batches_and_asks_for_no_more() -> None:
    """As Lightning does: it is evaluating when the run is stopped, and its loop has no end."""
    short = [*part(24, ended=False), *steps(6), *loader(1, [[0]], trains=False, ended=False)]
    (finding,) = examine([*part(36, ended=False), *steps(6)], short)
    assert (finding.confidence, finding.ranks) == (Confidence.PROVEN, (1,))
    within = [*part(24, ended=False), *steps(3)]
    assert not examine([*part(36, ended=False), *steps(3)], within)


def test_and_explained_after_it() -> None:
    (finding,) = examine(part(36, ended=False), part(24))
    assert finding.confidence is Confidence.PROVEN
    assert finding.ranks == (1,)
    assert finding.evidence["waiting"] == "rank 0"


def test_data_that_is_only_later_fewer_on_one_rank() -> None:
    def remade(last: int) -> list[Event]:
        whole = [loader(n, [list(range(36))], began={"step": 9 * n}, made=n) for n in range(2)]
        fields = {"began": {"step": 18}, "made": 2, "ended": last < 36, "length": 64 + last}
        return [*whole[0], *whole[1], *loader(2, [list(range(last))], **fields)]  # type: ignore[arg-type]

    (finding,) = examine(remade(36), remade(24))
    assert finding.rule == "dataset-length"


def test_shards_of_each_rank_are_not_to_be_divided_once_more() -> None:
    (finding,) = examine(part(36, ended=False, length=36), part(24, length=24))
    share = {"sampler": "DistributedSampler", "distributed": True}
    ranks = part(36, ended=False, length=72, **share), part(24, length=48, **share)
    (finding,) = examine(*ranks)
    assert finding.rule == "dataset-length"


def test_batches_of_different_sizes() -> None:
    ranks = part(24, ended=False, batch_size=3), part(24, batch_size=5)
    (finding,) = examine(*ranks)
    assert finding.ranks == (0, 1)
    (finding,) = examine(part(24, ended=False, batch_size=3), part(12, batch_size=5))


def test_streams_are_told_by_what_they_delivered() -> None:
    long = [*_unknown_length(36, ended=False), *steps(6, first=2)]
    (finding,) = examine(long, _unknown_length(24))
    assert finding.evidence["batches"] == {0: "at least 9", 1: 6}
    assert finding.rule == "unequal-shares"


def _unknown_length(count: int, *, ended: bool = True) -> list[Event]:
    return [
        msgspec.structs.replace(e, batches=-1) if isinstance(e, EpochBegan) else e
        for e in part(count, ended=ended, iterable=True)
    ]


def test_equal_counts() -> None:
    assert not examine(part(24), part(24))


def test_inside_join() -> None:
    joined = {"joined": True}
    assert not examine(part(36, ended=False, began=joined), part(24, began=joined))


def test_a_run_that_ended_well() -> None:
    assert not examine(part(36), part(24), ended={0: 0, 1: 0})


def test_evaluation() -> None:
    alone = {"collectives": 1}
    assert not examine(part(36, trains=False, ends=alone), part(24, trains=False, ends=alone))


def test_evaluation_that_communicates_for_every_batch() -> None:
    assert examine(part(36, trains=False, ends={"exhausted": False}), part(24, trains=False))


def test_an_evaluation_of_which_a_killed_rank_left_no_more_than_its_begin() -> None:
    def begun(*, communicates: bool) -> list[Finding]:
        ends = {"collectives": 6 if communicates else 1}
        killed = part(36, trains=False, ended=False)
        return examine(killed, part(24, trains=False, ends=ends), ended={0: -6, 1: 1})

    (finding,) = begun(communicates=True)
    assert finding.evidence["delivered"] == {1: 6}
    assert not begun(communicates=False)


def test_loops_that_were_left_before_the_difference() -> None:
    left = {"exhausted": False, "batches": 3}
    assert not examine(part(36, ends=left), part(24, ends=left))


LEFT = {"exhausted": False, "batches": 7, "backwards": 6}


def gone(message: str) -> Event:
    return ExceptionRaised(at=0, kind="RuntimeError", message=message)


def test_ranks_that_tell_each_other_that_one_has_no_more() -> None:
    assert not examine([*part(36, ends=LEFT), gone("of its own")], part(24))
    assert not examine(part(36, ends=LEFT | {"batches": 6}), part(24)), "known from the start"
    again = EpochBegan(at=0, loader=0, epoch=1, step=6, site=3, batches=9)
    killed = [*part(36, ends=LEFT), again, gone("Connection closed by peer")]
    after = EpochBegan(at=0, loader=0, epoch=1, step=6, site=3, batches=6)
    assert not examine(killed, [*part(24), after]), "in the epoch before"


def test_a_rank_that_left_the_loop_since_it_lost_the_others() -> None:
    assert examine([*part(36, ends=LEFT), gone("[gloo] Connection closed by peer")], part(24))


def test_a_failure_of_its_own_does_not_follow() -> None:
    (mine,) = examine(part(36, ended=False), part(24))
    late = {"reported": "Connection closed by peer"}
    other = Finding(
        code="DDP606", check="first-failure", severity=Severity.ERROR, summary="", cause="",
        fix="", evidence={"consequences": [late]}, errors=error_kinds("of its own"), at=mine.at + 1,
    )  # fmt: skip
    assert not UnevenBatches().explains(mine, other)


def test_a_batch_sampler_of_one_s_own() -> None:
    def batched(count: int, length: int) -> list[Event]:
        fields = {"sampler": "DistributedSampler", "batch_sampler": "Buckets", "length": length}
        return part(count, ended=count < 36, **fields)

    (finding,) = examine(batched(36, 130), batched(24, 128))
    assert finding.rule == "batch-sampler"


def test_what_follows_from_it_is_folded() -> None:
    check = UnevenBatches()
    (mine,) = examine(part(36, ended=False), part(24))
    told = error_kinds("[gloo] Connection closed by peer [127.0.0.1]:1234")
    other = Finding(
        code="DDP606", check="first-failure", severity=Severity.ERROR, summary="", cause="",
        fix="", errors=told, at=mine.at + 1,
    )  # fmt: skip
    assert check.explains(mine, other)


def test_options_of_another_epoch_follow_from_it() -> None:
    twice = {"began": {"step": [0, 6]}}
    (mine,) = examine(part(36, ended=False), loader(0, [list(range(24))] * 2, **twice))
    other = Finding(
        code="DDP405", check="hyperparameter-skew", severity=Severity.ERROR, summary="", cause="",
        fix="", steps=Steps(6, 9, 4),
    )  # fmt: skip
    assert UnevenBatches().explains(mine, other)
    assert not UnevenBatches().explains(mine, msgspec.structs.replace(other, steps=Steps(5, 9, 5)))


def test_one_rank_that_reads_what_the_others_share() -> None:
    share: dict[str, object] = {"sampler": "DistributedSampler", "distributed": True, "replicas": 3}
    (finding,) = examine(
        part(36, ended=False, site=4),
        part(24, **share),
        part(24, **share),
        ended={0: 1, 1: 0, 2: 0},
    )
    assert finding.ranks == (0,)
    assert finding.location is not None and finding.location.line == 21
    (finding,) = examine(part(36, ended=False), part(24))
    assert finding.ranks == (1,), "nobody takes a share"


def test_a_batch_that_was_lost_to_an_exception() -> None:
    bad = ExceptionPassed(at=0, where="data", kind="OSError", message="truncated", step=3)
    short = [
        *(e for e in part(36, ended=False) if not isinstance(e, EpochEnded)),
        *(e for e in part(32) if isinstance(e, EpochEnded)),
    ]
    long = [*part(36, ended=False), *steps(9, first=2)]
    (finding,) = examine(long, [bad, *short])
    assert finding.ranks == (1,)
    (finding,) = examine([bad, *long], short)
    (finding,) = examine(part(36, ended=False), [bad, *part(24)])


@pytest.mark.parametrize(("more", "told"), [(0, Steps(6, 6, 1)), (9, None)])
def test_the_step_in_which_others_go_on_alone(more: int, told: Steps | None) -> None:
    short = [*part(24), *steps(6 + more)]  # with more, it trained on something else besides
    (finding,) = examine([*part(36, ended=False), *steps(6)], short)
    assert finding.steps == told


def test_the_step_before_its_next_epoch() -> None:
    after = EpochBegan(at=0, loader=0, epoch=1, step=6, site=3, batches=6)
    short = [*part(24), *steps(6), after, *steps(30, first=6)]
    (finding,) = examine([*part(36, ended=False), *steps(6)], short, ended={0: None, 1: None})
    assert finding.steps == Steps(6, 6, 1)


def test_steps_of_several_optimizers_are_not_told_apart() -> None:
    both = [OptimizerSeen(at=0, optimizer=n, kind="Adam", site=-1) for n in (0, 1)]
    (finding,) = examine([*part(36, ended=False)], [*part(24), *both, *steps(6)])
    assert finding.steps is None


def test_batches_are_told_once_where_only_what_was_delivered_is_known() -> None:
    stream = {"iterable": True, "length": -1, "began": {"batches": -1}}
    (finding,) = examine(
        [*part(24, **stream), *steps(6)], [*part(36, ended=False, **stream), *steps(7, first=2)]
    )
    assert "delivered" not in finding.evidence
    (known,) = examine(part(36, ended=False), part(24))
    assert known.evidence["delivered"] == {0: "at least 2", 1: 6}


@pytest.mark.parametrize(
    ("phase", "told"), [(Phase.BACKWARD, True), (Phase.DATA, False), (Phase.OPTIMIZER, False)]
)
def test_a_rank_that_waits_for_a_batch_is_not_said_to_have_it(phase: Phase, told: bool) -> None:
    long = [*_unknown_length(24, ended=False), *steps(4, first=2)]
    run = run_of(long, [*_unknown_length(24), *steps(6)], ended={0: -15, 1: -15})
    with mock.patch.object(Rank, "ring", mock.Mock(phase=phase)):
        assert bool(found(UnevenBatches(), run)) is told


def test_a_rank_that_works_after_its_last_batch_waits_in_no_other() -> None:
    """It evaluates, say: both ranks have as many batches as their loaders said."""
    assert not examine([*part(24, ended=False), *steps(4, first=2)], part(24))
    more = loader(0, [list(range(24))], ended=False, exhausted=False)  # whose length is 7
    (finding,) = examine([*more, *steps(4, first=2)], part(24))
    assert "7 on rank 0" in finding.summary


def test_several_steps_for_a_batch_do_not_tell_of_batches() -> None:
    """Rank 1 is still in its last batch, for which it takes more steps than rank 0 did for its."""

    def with_steps(events: list[Event], count: int) -> list[Event]:
        begin = next(n for n, e in enumerate(events) if isinstance(e, EpochBegan)) + 1
        taken = [StepDone(at=0, optimizer=0, step=n, site=4, wall_s=0.1) for n in range(count)]
        rest = [e for e in events[begin:] if not isinstance(e, StepDone)]
        return [*events[:begin], *taken, *rest]

    def judged(unended: int, whole: int) -> list[Finding]:
        return examine(with_steps(part(24, ended=False), unended), with_steps(part(24), whole))

    assert judged(21, 20) == []
    (finding,) = judged(9, 6)
    assert finding.evidence["batches"] == {0: "at least 10", 1: 6}
