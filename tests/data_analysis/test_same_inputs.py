"""data-overlap without a loader: the inputs of models, and gradients before their exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from ddpdoctor.checks.data.data_overlap import DataOverlap
from readers import found, loader, prologue, run_of
from recordings import make_run, steps

from ddpdoctor.analysis.data.forward_inputs import sharded_inputs
from ddpdoctor.analysis.data.loaders import loaders
from ddpdoctor.events import (
    Averaged,
    CallBlock,
    CallRun,
    Event,
    ForwardInput,
    GroupReady,
    LossValues,
    Seeded,
    Signature,
    Unwrapped,
)
from ddpdoctor.report.findings import Finding, Severity


def examine(*ranks: Sequence[Event]) -> list[Finding]:
    return found(DataOverlap(), run_of(*ranks))


def inputs(digests: Sequence[int], **more: object) -> list[Event]:
    fields: dict[str, object] = {"numbers": 128, "rows": 4, "fed": False, **more}
    return [
        ForwardInput(at=0, model=0, forward=n, site=4, digest=d, **fields)  # type: ignore[arg-type]
        for n, d in enumerate(digests)
    ]


def test_a_plain_loop_that_takes_the_same_samples_everywhere() -> None:
    (finding,) = examine(inputs([1, 2, 3, 4, 5]), inputs([1, 2, 3, 4, 5]))
    assert finding.severity is Severity.ERROR
    assert finding.location is not None and finding.location.line == 21


@pytest.mark.parametrize(("count", "told"), [(20, 0), (3, 1)])
def test_forwards_before_one_step_are_a_warm_up(count: int, told: int) -> None:
    """Unless the run took no more steps than that."""
    ranks = [[*inputs([1, 2, 3, 4, 5], step=0), *steps(count)] for _ in range(2)]
    assert len(examine(*ranks)) == told


@pytest.mark.parametrize(("apart", "inside", "told"), [
    (0.2, 0, 0),  # each rank takes other parts of what the model gives, or other targets
    (1e-6, 0, 1),
    (0.2, 4, 1),  # dropout
    (0.2, -1, 1),  # unknown
])  # fmt: skip
def test_ranks_that_compute_other_losses_from_the_same_inputs(
    apart: float, inside: int, told: int
) -> None:
    def rank(number: int) -> list[Event]:
        given = [
            msgspec.structs.replace(e, step=n, inside=inside)
            for n, e in enumerate(inputs([1, 2, 3, 4, 5]))
        ]
        values = tuple(2.0 - 0.1 * n + apart * number for n in range(5))
        return [*given, *steps(5), LossValues(at=0, steps=tuple(range(5)), values=values)]

    assert len(examine(rank(0), rank(1))) == told


def sharded(digests: Sequence[int], ranks: tuple[int, ...]) -> list[Event]:
    """Inputs of a model that `fully_shard` shards over these ranks; none is wrapped."""
    return [
        msgspec.structs.replace(e, model=-2, kind="LM", ranks=ranks)
        for e in inputs(digests)
        if isinstance(e, ForwardInput)
    ]


def test_a_sharded_model_that_is_given_the_same_everywhere() -> None:
    same = [1, 2, 3, 4, 5]
    (finding,) = examine(sharded(same, (0, 1)), sharded(same, (0, 1)))
    assert (finding.rule, finding.ranks) == ("equal-inputs", (0, 1))
    assert not examine(sharded(same, (0, 1)), sharded([6, 7, 8, 9, 10], (0, 1)))


def test_ranks_of_one_tensor_parallel_group_are_given_the_same() -> None:
    """Ranks 0 and 1 hold pieces of one layer; the data is divided over 0 and 2, 1 and 3."""
    ranks = [
        sharded([1 + n // 2, 3, 4 + n // 2, 5, 6 + n // 2], (n % 2, 2 + n % 2)) for n in range(4)
    ]
    assert not examine(*ranks)


def shown(first: int, digests: Sequence[int]) -> list[Event]:
    """Three forwards in `eval()` mode, then those of training."""
    evaluated = inputs([first, first + 1, first + 2], training=False)
    trained = inputs([0, 0, 0, *digests])[3:]
    return [*(msgspec.structs.replace(e, site=3) for e in evaluated), *trained]


def test_what_training_is_given_is_compared_and_pointed_at() -> None:
    same = [1, 2, 3, 4]
    (finding,) = examine(shown(50, same), shown(50, same))
    assert finding.location is not None and finding.location.line == 21
    assert examine(shown(50, same), shown(60, same))
    assert not examine(shown(50, same), shown(50, [5, 6, 7, 8]))


def test_positions_drawn_alike_are_no_toy_data() -> None:
    """Four positions are drawn, 128 numbers read."""
    (finding,) = examine(*([inputs([1, 2, 3, 4, 5], drawn=4)] * 2))
    assert finding.severity is Severity.ERROR


def test_toy_data_drawn_on_the_spot_is_a_note() -> None:
    (finding,) = examine(*([inputs([1, 2, 3, 4, 5], drawn=130)] * 2))
    assert finding.severity is Severity.NOTE


def test_toy_inputs_that_never_change_are_a_note() -> None:
    (finding,) = examine(inputs([1] * 9), inputs([1] * 9), inputs([2] * 9))
    assert (finding.severity, finding.ranks) == (Severity.NOTE, (0, 1))
    assert examine(*[inputs([1, 2] * 4)] * 2)
    assert not examine(inputs([1] * 9), inputs([2] * 9))
    assert not examine(*[inputs([1] * 9, training=False)] * 2)
    assert not examine(inputs([5, 5, 5, 1, 1, 1, 1]), inputs([6, 6, 6, 1, 1, 1, 1]))


def test_inputs_that_become_the_same() -> None:
    mine, yours = [1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 4, 5, 6, 7]
    (finding,) = examine(inputs(mine), inputs(yours))
    assert finding.severity is Severity.ERROR
    assert finding.subjects == ("inputs of Net",)
    assert finding.evidence["differed last at"] == 2
    (finding,) = examine(inputs(mine), inputs(yours), inputs([21, 22, 23, 24, 25, 26, 27]))
    assert finding.ranks == (0, 1)
    assert not examine(inputs(mine[:-1]), inputs(yours[:-1]))
    assert not examine(inputs([*mine, 8]), inputs([*yours, 9]))
    assert not examine(inputs([1, 2, 3, 7, 7, 7, 7]), inputs([4, 5, 6, 7, 7, 7, 7]))


def drawn(digests: Sequence[int], *, moves: bool = True) -> list[Event]:
    """Inputs that were drawn from torch's generator, or (`moves`) while it stood still."""
    events = (e for e in inputs(digests) if isinstance(e, ForwardInput))
    return [msgspec.structs.replace(e, states=(e.digest if moves else 5, 5, 5)) for e in events]


def test_inputs_that_are_the_same_until_a_rank_draws_something_else() -> None:
    """An evaluation on rank 0 advances its generator alone."""
    (finding,) = examine(inputs(range(1, 15)), inputs([*range(1, 11), *range(21, 25)]))
    assert (finding.rule, finding.severity) == ("inputs-drawn-alike", Severity.ERROR)
    assert "at the first 10 of 14 compared forwards" in finding.summary
    assert not examine(inputs(range(1, 15)), inputs([*range(1, 5), *range(21, 31)]))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (range(5, 19), "rank 0 at forward n + 4 those of rank 1 at forward n (10 of 14 compared)"),
        (range(-2, 12), "rank 1 at forward n + 3 those of rank 0 at forward n (11 of 14 compared)"),
    ],
)
def test_inputs_that_ranks_draw_some_forwards_apart(other: Sequence[int], said: str) -> None:
    (finding,) = examine(drawn(range(1, 15)), drawn([d % 100 for d in other]))
    assert (finding.rule, finding.ranks) == ("inputs-drawn-alike", (0, 1))
    assert said in finding.summary


def test_ranks_that_go_through_the_same_batches_each_from_another_one() -> None:
    mine, other = range(1, 15), range(3, 17)
    assert not examine(drawn(mine, moves=False), drawn(other, moves=False))
    assert not examine(inputs(mine), inputs(other))
    assert not examine(drawn([1, 2, 3, 4] * 4), drawn([2, 3, 4, 1] * 4))


def test_toy_data_of_seeds_that_add_step_and_rank_up() -> None:
    made = [
        [msgspec.structs.replace(e, drawn=130) for e in drawn(range(n, n + 14))] for n in (1, 2)
    ]
    assert not examine(*made)


def test_a_state_carried_on_from_another_one_is_not_known_to_be_the_same() -> None:
    """The first of each rollout shows the state that it begins with."""
    mine, same = inputs([1, 2, 3, 4, 5, 6]), inputs([0, 2, 3, 4, 5, 6], carried=True)[1:]
    (finding,) = examine([mine[0], *same], [mine[0], *same])
    assert finding.severity is Severity.ERROR
    (other, *_) = inputs([11])
    assert examine(mine, [other, *mine[1:]])
    assert not examine([mine[0], *same], [other, *same])


def test_inputs_that_differ_or_are_out_of_sight() -> None:
    assert not examine(inputs([1, 2, 3, 4]), inputs([5, 6, 7, 8]))
    assert not examine(inputs([0] * 5), inputs([0] * 5))


def test_inputs_from_a_loader_are_judged_there() -> None:
    assert not examine(*([inputs([1, 2, 3, 4], fed=True)] * 2))


def test_two_steps_prove_nothing() -> None:
    assert not examine(inputs([1, 2]), inputs([1, 2]))


def test_inputs_handed_out_by_one_rank() -> None:
    broadcasts = [
        Signature(at=0, id=0, op="broadcast", numel=128, root=0),
        CallBlock(at=0, id=0, codes=(0, 0)),
        CallRun(at=0, group=0, first=0, block=0, repeat=5),
    ]
    ranks = [[*inputs([1, 2, 3, 4, 5]), *broadcasts]] * 2
    assert not found(DataOverlap(), run_of(*ranks))


def test_a_tensor_parallel_pair_shares_its_inputs() -> None:
    """Gradients are averaged between 0 and 2, and between 1 and 3."""
    given = {0: [1, 2, 3, 4], 1: [1, 2, 3, 4], 2: [5, 6, 7, 8], 3: [5, 6, 7, 8]}
    events = {r: [*prologue(4, group=(r % 2, r % 2 + 2)), *inputs(d)] for r, d in given.items()}
    assert not found(DataOverlap(), make_run(events))


@pytest.mark.parametrize(
    ("op", "numel", "rounds", "meant"),
    [
        ("all_gather", 64, 4, True),
        ("all_to_all", -1, 4, True),
        ("all_gather", 64, 3, False),  # now and then
        ("all_reduce", 1, 4, False),  # a loss for the log
        ("barrier", -1, 4, False),
        ("DDP backward", -1, 4, False),
    ],
)
def test_ranks_that_compute_together_share_their_inputs(
    op: str, numel: int, rounds: int, meant: bool
) -> None:
    """0 and 1, 2 and 3 exchange; all of them average gradients."""
    given = {r: [10 * (r // 2) + n for n in range(1, 5)] for r in range(4)}
    events = {
        r: [
            *prologue(4),
            GroupReady(at=0, group=1, name="1", backend="gloo", member=True, site=1,
                       ranks=(r // 2 * 2, r // 2 * 2 + 1)),
            Signature(at=0, id=0, op=op, numel=numel),
            CallBlock(at=0, id=0, codes=(0, 0)),
            CallRun(at=0, group=1, first=0, block=0, repeat=rounds),
            *inputs(digests),
        ]
        for r, digests in given.items()
    }  # fmt: skip
    every = found(DataOverlap(), make_run(events))
    assert len(every) == (not meant)
    assert all(f.ranks == (0, 1, 2, 3) for f in every)


def by_hand(seeds: Sequence[int], given: Sequence[int], **more: object) -> list[Event]:
    """Steps of a model without a wrapper: its gradients before the program exchanges them."""
    fields: dict[str, object] = {"alone": True, "numbers": 128, "drawn": 0, "site": 4, **more}
    return [
        Unwrapped(at=0, optimizer=0, kind="Net", parameters=(), site=-1, step_site=3),
        *(
            Averaged(at=0, optimizer=0, step=1 + n, local=(seed / 8, -seed), applied=(1.0, 1.0),
                     inputs=digest, **fields)  # type: ignore[arg-type]
            for n, (seed, digest) in enumerate(zip(seeds, given, strict=True))
        ),
    ]  # fmt: skip


def unwrapped(*ranks: Sequence[Event]) -> list[Finding]:
    events = {r: [*prologue(len(ranks), wrapped=False), *e] for r, e in enumerate(ranks)}
    return found(DataOverlap(), make_run(events))


def test_gradients_that_are_the_same_before_they_are_exchanged() -> None:
    (finding,) = unwrapped(*[by_hand([3, 5, 7], [1, 2, 3])] * 2)
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (0, 1))
    assert finding.location is not None and finding.location.line == 21
    assert finding.steps is not None and (finding.steps.first, finding.steps.last) == (1, 3)


@pytest.mark.parametrize(
    ("given", "more"),
    [([0, 0, 0], {}), ([1, 2, 3], {"drawn": 130}), ([1, 1, 1], {})],
)
def test_the_same_gradients_of_inputs_that_may_be_toy_data(
    given: list[int], more: dict[str, object]
) -> None:
    (finding,) = unwrapped(*[by_hand([3, 5, 7], given, **more)] * 2)
    assert finding.severity is Severity.NOTE


def test_equal_gradients_of_a_model_that_is_not_called_and_what_is_seeded_alike() -> None:
    """The line of the backward, and every generator that is: another seed is told by none."""
    seeds = [
        Seeded(at=0, generator=name, seed="1", site=site)
        for name, site in (("random", 1), ("numpy", 2), ("torch", 3))
    ]
    mine = by_hand([3, 5, 7], [0, 0, 0], site=-1, backward_site=4)
    (finding,) = unwrapped([*seeds, *mine], [*seeds, *mine])
    assert finding.location is not None and finding.location.line == 21
    assert len(finding.related) == 3 and finding.fix.count("(1 + rank)") == 3
    other = [*seeds[1:], msgspec.structs.replace(seeds[0], seed="2")]
    (finding,) = unwrapped([*seeds, *mine], [*other, *mine])
    assert len(finding.related) == 2 and "`random.seed" not in finding.fix


def test_gradients_of_master_weights_that_are_set_after_the_exchange() -> None:
    """What is there before the exchange is what the last step applied."""
    events = by_hand([3, 5, 7], [1, 2, 3])
    applied = [*(e.local for e in events[2:] if isinstance(e, Averaged)), (1.0, 1.0)]
    stale = [
        msgspec.structs.replace(e, applied=applied.pop(0)) if isinstance(e, Averaged) else e
        for e in events
    ]
    assert not unwrapped(stale, stale)


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        (by_hand([3, 5, 7], [1, 2, 3]), by_hand([3, 5, 8], [1, 2, 3])),
        (by_hand([3, 5, 7], [1, 2, 3]), by_hand([3, 5, 7], [1, 2, 4])),
        *[(e, e) for e in [by_hand([0, 0, 0], [1, 2, 3]),
                           by_hand([3, 5], [1, 2]),
                           by_hand([3, 5, 7], [1, 2, 3], alone=False)]],
    ],
)  # fmt: skip
def test_gradients_that_prove_nothing(mine: list[Event], yours: list[Event]) -> None:
    assert not unwrapped(mine, yours)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (inputs([0, 0, 0]), "no input of a wrapped model was in host memory"),
        ([], "no forward of a wrapped model was seen"),
    ],
)
def test_why_nothing_is_known(events: Sequence[Event], reason: str) -> None:
    assert reason in (DataOverlap().unobserved(run_of(events, events)) or "")
    known = inputs([1, 2, 3])
    assert DataOverlap().unobserved(run_of(known, known)) is None


@pytest.mark.parametrize(("numbers", "batch", "parts"), [
    ((64, 64), (128, 128), True),
    ((64, 128), (128, 128), False),  # together more than the batch
    ((64, 64), (0, 0), False),
    ((64, 64), (128, 256), False),
])  # fmt: skip
@pytest.mark.parametrize("wrapped", [True, False])
def test_ranks_that_take_parts_of_one_batch(
    numbers: tuple[int, int], batch: tuple[int, int], parts: bool, wrapped: bool
) -> None:
    """Pieces of each sequence, say: each rank reads all samples."""
    ranks = []
    for r in range(2):
        digests = [10 * r + n for n in range(1, 6)]
        fields: dict[str, Any] = {"numbers": numbers[r], "batch": batch[r]}
        given = (
            inputs(digests, fed=True, loaders=(0,), rows=4, **fields)
            if wrapped
            else by_hand(digests, digests, **fields)
        )
        ranks.append([*prologue(2, wrapped=wrapped), *loader(0, [[*range(40)]], length=40), *given])
    run = make_run(dict(enumerate(ranks)))
    (read,) = loaders(run)
    assert sharded_inputs(run, list(read.readers.values())) is parts
