"""sampler-missing: who reads what everybody reads, and who only seems to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from ddpdoctor.checks.data.sampler_missing import SamplerMissing
from readers import fingerprints, found, loader, prologue, run_of
from recordings import make_run

from ddpdoctor.events import (
    Event,
    ForwardInput,
    Payload,
    ProbeTrouble,
    StepDone,
    UnwrappedState,
    Wrapped,
)
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Finding, Severity, Steps

EVERYTHING = list(range(100))
BACKWARDS = EVERYTHING[::-1]


def examine(*ranks: Sequence[Event], **options: object) -> list[Finding]:
    return found(SamplerMissing(), run_of(*ranks, **options))


def test_ranks_that_read_the_same_samples() -> None:
    (finding,) = examine(
        loader(0, [EVERYTHING], content=1), loader(0, [BACKWARDS], content=1)
    )  # fmt: skip
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 11
    assert finding.evidence["same order"] is False


@pytest.mark.parametrize(("by", "sampler", "fix"), [
    ("", "RandomSampler", "DistributedSampler"),
    ("accelerate.accelerator", "RandomSampler", "accelerator.prepare"),
    ("lightning.fabric.fabric", "RandomSampler", "setup_dataloaders"),
    ("accelerate.accelerator", "Weighted", "keep the selection"),  # a choice of the program's
])  # fmt: skip
def test_a_loader_that_a_framework_would_divide(by: str, sampler: str, fix: str) -> None:
    read = loader(0, [EVERYTHING], content=1, sampler=sampler)
    wrap = Wrapped(at=0, model=1, wrapper="DistributedDataParallel", kind="Net", group=0, site=-1,
                   by=by)  # fmt: skip
    ranks = [[*prologue(2, wrapped=False), wrap, *read] for _ in range(2)]
    (finding,) = found(SamplerMissing(), make_run(dict(enumerate(ranks))))
    assert fix in finding.fix
    assert ("DistributedSampler" in finding.fix) is (not by)


def test_a_loader_that_comes_late_in_the_training() -> None:
    late, first = (
        examine(*(loader(0, [EVERYTHING], content=1, began={"step": n}) for _ in range(2)))
        for n in (1, 0)
    )
    assert late[0].steps == Steps(1, 1, 1)
    assert first[0].steps is None


@pytest.mark.parametrize(("read", "exhausted"), [
    (EVERYTHING, True),
    (EVERYTHING[:40], True),
    (EVERYTHING[:40], False),
])  # fmt: skip
def test_a_sampler_of_the_program_keeps_its_choice(read: list[int], exhausted: bool) -> None:
    ranks = [
        loader(0, [read], content=1, exhausted=exhausted, sampler="Weighted") for _ in range(2)
    ]
    (finding,) = examine(*ranks)
    batched = [[msgspec.structs.replace(ranks[0][0], batch_sampler="Buckets"), *ranks[0][1:]]] * 2
    (finding,) = examine(*batched)
    assert finding.rule == "undivided-selection"


@pytest.mark.parametrize(
    ("read", "plain"), [(EVERYTHING, True), (EVERYTHING[:40], False), ([*EVERYTHING, 5], False)]
)
def test_a_choice_of_everything_is_none(read: list[int], plain: bool) -> None:
    ranks = [loader(0, [read], content=1, sampler="SubsetRandomSampler") for _ in range(2)]
    (finding,) = examine(*ranks)
    assert finding.rule == ("no-distributed-sampler" if plain else "undivided-selection")


def looked_at(numbers: range, rows: list[int]) -> list[Event]:
    """These samples in the order of their numbers, with these digests."""
    *head, end = loader(0, [numbers], exhausted=False)
    read = fingerprints(0, 0, numbers, 1)
    return [*head, msgspec.structs.replace(read, columns=(pack(rows),)), end]


def flipped(numbers: range, seed: int) -> list[Event]:
    """Samples of one data set, of which each rank flips every other one at random."""
    flips = random.Random(seed)
    rows = [1000 + i if flips.random() < 0.5 else 9000 + i for i in numbers]
    return looked_at(numbers, rows)


@pytest.mark.parametrize("common", [range(70), range(30, 100)])
def test_samples_that_all_ranks_have_beside_their_own(common: range) -> None:
    ranks = [
        looked_at(range(100), [i + (9000 if i in common else 1000 * rank) for i in range(100)])
        for rank in (1, 2)
    ]
    assert not examine(*ranks)


def test_samples_that_some_ranks_flip_are_the_same_samples() -> None:
    (finding,) = examine(flipped(range(60), 1), flipped(range(20, 80), 6))
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize("replacement", [True, False])
def test_samples_drawn_anew_each_time(replacement: bool) -> None:
    draws = [[4, 18, 37, 50], [9, 18, 62, 71]]
    ranks = [
        loader(0, [drawn], content=1, exhausted=False, replacement=replacement) for drawn in draws
    ]
    assert bool(examine(*ranks)) is not replacement


def noisy(rank: int, held: Payload, settings: int = 7) -> list[Event]:
    """A data set that adds noise to what it holds, read whole in two epochs."""
    events = loader(0, [EVERYTHING] * 2, payloads=(held,), settings=settings)
    read = [fingerprints(0, epoch, EVERYTHING, 2 * rank + epoch) for epoch in range(2)]
    return [*events, *read]


@pytest.mark.parametrize(("mine", "theirs", "settings", "severity"), [
    (Payload("x", "tensor", 100, 5, tells=True), 5, 7, Severity.ERROR),
    (Payload("files", "text", 100, 5, tells=True), 5, 7, Severity.ERROR),
    (Payload("files", "text", 100, 5, tells=True), 5, 8, Severity.NOTE),  # in another folder
    (Payload("labels", "tensor", 100, 5), 5, 7, Severity.NOTE),
    (Payload("labels", "tensor", 100, 5), 5, 8, None),  # each is told which of the ranks it is
    (Payload("x", "tensor", 100, 5, tells=True), 6, 7, None),
])  # fmt: skip
def test_augmented_samples_are_known_by_what_they_are_made_of(
    mine: Payload, theirs: int, settings: int, severity: Severity | None
) -> None:
    second = msgspec.structs.replace(mine, order=theirs)
    found = examine(noisy(0, mine), noisy(1, second, settings))
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_an_epoch_that_was_left_early_counts_what_it_read() -> None:
    (finding,) = examine(
        loader(0, [EVERYTHING[:12]], content=1, exhausted=False),
        loader(0, [EVERYTHING[:12]], content=1, exhausted=False),
    )
    assert finding.severity is Severity.ERROR
    assert "stopped early" in str(finding.evidence["samples read"])


def test_a_rank_that_was_killed_keeps_what_it_had_read() -> None:
    from array import array

    from ddpdoctor.events import IndicesRead
    from ddpdoctor.events.pack import pack_ascending

    killed = [
        *loader(0, [EVERYTHING], content=1, ended=False),
        IndicesRead(at=0, loader=0, epoch=0, batches=10, samples=40, backwards=10,
                    indices=pack_ascending(array("q", range(40)))),
    ]  # fmt: skip
    (finding,) = examine(killed, loader(0, [EVERYTHING], content=1), ended={0: -9})
    assert finding.rule == "no-distributed-sampler"


def test_one_of_many_loaders_that_shard_by_hand_at_one_line() -> None:
    """Only the first loaders' samples are looked at; later ones of that line are no different."""
    ranks = [
        [*loader(0, [EVERYTHING], content=1 + r), *loader(7, [EVERYTHING[:50]], length=50)]
        for r in range(2)
    ]
    assert not examine(*ranks)
    alike = [[*loader(0, [EVERYTHING], content=1), *rank[len(rank) // 2 :]] for rank in ranks]
    assert examine(*alike)


def test_data_sharded_by_hand_is_other_data_behind_the_same_indices() -> None:
    assert not examine(loader(0, [EVERYTHING], content=1), loader(0, [EVERYTHING], content=2))


def test_payloads_tell_where_content_cannot() -> None:
    mine, theirs = (Payload(name="files", kind="text", length=100, order=n) for n in (1, 2))
    assert not examine(
        loader(0, [EVERYTHING], payloads=(mine,)), loader(0, [EVERYTHING], payloads=(theirs,))
    )


@pytest.mark.parametrize("lists_differ", [True, False])
def test_labels_that_agree_between_shards(lists_differ: bool) -> None:
    """Sorted labels are alike at equal indices; the files behind them are others."""
    ranks = []
    for number in range(2):
        files = Payload(name="files", kind="text", length=100, order=number * lists_differ)
        events = loader(0, [EVERYTHING], payloads=(files,))
        mine = fingerprints(0, 0, EVERYTHING, number)
        labels = pack(i % 2 + 1 for i in EVERYTHING)
        events.append(msgspec.structs.replace(mine, columns=(*mine.columns, labels)))
        ranks.append(events)
    assert bool(examine(*ranks)) is not lists_differ


def test_batches_that_were_given_are_made_of_a_distributed_sampler() -> None:
    (finding,) = examine(*(loader(0, [EVERYTHING], content=1, batches_given=True) for _ in "ab"))
    assert finding.rule == "no-distributed-sampler"


def test_a_single_sample_is_not_called_alike() -> None:
    (finding,) = examine(*(loader(0, [[5]], length=1, content=1) for _ in "ab"))
    assert finding.rule == "no-distributed-sampler"


def test_content_out_of_sight_is_only_suspected() -> None:
    (finding,) = examine(loader(0, [EVERYTHING]), loader(0, [EVERYTHING]))
    assert finding.severity is Severity.NOTE


def test_shares_that_do_not_overlap() -> None:
    assert not examine(
        loader(0, [EVERYTHING[::2]], content=1, sampler="MySampler"),
        loader(0, [EVERYTHING[1::2]], content=1, sampler="MySampler"),
    )


@pytest.mark.parametrize(
    ("over", "grad_enabled"),
    [
        (2000.0, True),
        (1.0, False),
        (1.0, True),
    ],
)
def test_everything_read_on_every_rank_without_training_is_a_note(
    over: float, grad_enabled: bool
) -> None:
    """Moments for a normalisation, say, are read before there is a model."""
    ends = {"grad_enabled": grad_enabled}
    ranks = []
    for _ in range(2):
        *events, ended = loader(0, [EVERYTHING], content=1, trains=False, ends=ends)
        ranks.append([*events, msgspec.structs.replace(ended, at=over)])
    (finding,) = examine(*ranks)
    assert (finding.severity, finding.rule) == (Severity.NOTE, "equal-evaluation")


def test_evaluation_on_one_rank() -> None:
    assert not examine(loader(0, [EVERYTHING], content=1, trains=False), [])


def test_drawn_with_replacement_from_other_streams() -> None:
    mine, theirs = [1, 1, 2, 5, 9, 9, 30, 31], [1, 2, 2, 7, 9, 30, 30, 44]
    kind = "WeightedRandomSampler"
    assert not examine(
        loader(0, [mine], content=1, sampler=kind), loader(0, [theirs], content=1, sampler=kind)
    )
    (finding,) = examine(
        loader(0, [mine], content=1, sampler=kind), loader(0, [mine], content=1, sampler=kind)
    )
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(("count", "replacement", "again"), [
    (50, True, False),
    (100, True, True),
    (50, False, True),  # a part of the data set that was chosen for training, say
])  # fmt: skip
def test_a_draw_of_a_rank_s_share_is_not_divided_once_more(
    count: int, replacement: bool, again: bool
) -> None:
    drawn = {"sampler": "WeightedRandomSampler", "replacement": replacement}
    ranks = [loader(0, [EVERYTHING[:count]], content=1, **drawn) for _ in range(2)]
    (finding,) = examine(*ranks)
    assert finding.rule == ("undivided-selection" if again else "equal-draws")


def test_ranks_of_a_tensor_parallel_group_read_the_same_on_purpose() -> None:
    # ranks 0 and 1 share a model in two parts; 0 and 2, 1 and 3 average gradients
    shares = {0: EVERYTHING[::2], 1: EVERYTHING[::2], 2: EVERYTHING[1::2], 3: EVERYTHING[1::2]}
    events = {
        r: [*prologue(4, group=(r % 2, r % 2 + 2)), *loader(0, [share], content=1, sampler="Own")]
        for r, share in shares.items()
    }
    assert not found(SamplerMissing(), make_run(events))


def test_ranks_that_train_models_of_their_own() -> None:
    """No wrapper and nothing communicated: an ensemble, say."""
    events = {
        r: [*prologue(2, wrapped=False),
            *loader(0, [EVERYTHING], content=1, ends={"collectives": 1})]
        for r in range(2)
    }  # fmt: skip
    assert not found(SamplerMissing(), make_run(events))


def test_gradients_averaged_by_hand() -> None:
    events = {
        r: [*prologue(2, wrapped=False), *loader(0, [EVERYTHING], content=1)] for r in range(2)
    }  # fmt: skip
    (finding,) = found(SamplerMissing(), make_run(events))
    assert finding.severity is Severity.ERROR


def test_sharded_parameters_without_a_wrapper_may_need_equal_inputs() -> None:
    events = {
        r: [*prologue(2, wrapped=False),
            *loader(0, [EVERYTHING], content=1, ends={"sharded": True})]
        for r in range(2)
    }  # fmt: skip
    assert not found(SamplerMissing(), make_run(events))


@pytest.mark.parametrize("indices", [[], [0]])
def test_hardly_any_data(indices: list[int]) -> None:
    run = run_of(loader(0, [indices], length=len(indices)), loader(0, [[]], length=len(indices)))
    assert not found(SamplerMissing(), run)


def test_nothing_was_iterated() -> None:
    assert SamplerMissing().unobserved(run_of([], [])) == "no DataLoader was iterated"


def test_loaders_that_could_not_be_followed() -> None:
    from ddpdoctor.probe.watchers.data.loaders import Loaders

    run = run_of([ProbeTrouble(at=1, part="data", error="TypeError()", lost=Loaders.lost)], [])
    assert SamplerMissing().unobserved(run) == "the doctor failed to follow the DataLoaders"


def test_the_loader_is_joined_by_its_lines_not_by_its_number() -> None:
    """Rank 0 alone iterates another loader first."""
    first = loader(0, [[1, 2, 3, 4]], trains=False, site=1, loop_site=4)
    (finding,) = examine(
        [*first, *loader(1, [EVERYTHING], content=1)], loader(0, [EVERYTHING], content=1)
    )
    assert finding.ranks == (0, 1)


def rows_of_a_batch(begins: int, rows: int = 8, loaders: tuple[int, ...] = ()) -> list[Event]:
    """Forwards that are given a slice of each batch."""
    return [
        ForwardInput(at=0, model=0, forward=n, site=4, digest=0, numbers=40, rows=rows, fed=True,
                     loaders=loaders, begins=begins)
        for n in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize("trains", [True, False])
def test_each_rank_takes_its_own_rows_of_every_batch(trains: bool) -> None:
    """The whole batch is for what the model shares out in another way: its embeddings."""
    reads = loader(0, [EVERYTHING], content=1, trains=trains)
    assert not examine(*([*rows_of_a_batch(8 * r), *reads] for r in range(2)))
    assert examine(*([*rows_of_a_batch(8), *reads] for r in range(2)))
    assert examine(*([*rows_of_a_batch(4 * r), *reads] for r in range(2)))


def test_rows_of_batches_of_another_loader() -> None:
    reads = loader(0, [EVERYTHING], content=1)
    own, other = ([*rows_of_a_batch(0, loaders=(n,)), *reads] for n in (0, 1))
    assert not examine(own, [*rows_of_a_batch(8, loaders=(0,)), *reads])
    assert examine(other, [*rows_of_a_batch(8, loaders=(1,)), *reads])


@pytest.mark.parametrize(
    ("rows", "digests", "fed", "finds"),
    [
        (2, (1, 2), True, False),  # `x[rank::2]` of batches of 4, say
        (4, (1, 2), True, True),  # whole batches, augmented by each rank
        (2, (1, 1), True, True),  # the same half on both
        (2, (0, 0), True, True),  # not known
        (2, (1, 2), False, True),  # something else than what the loader delivered
    ],
)
def test_each_rank_takes_other_rows_of_every_batch(
    rows: int, digests: tuple[int, int], fed: bool, finds: bool
) -> None:
    reads = loader(0, [EVERYTHING], content=1)
    given = [
        [
            ForwardInput(at=0, model=0, forward=n, site=4, digest=d and 10 * n + d, numbers=8,
                         rows=rows, fed=fed)
            for n in range(6)
        ]
        for d in digests
    ]  # fmt: skip
    assert bool(examine(*([*mine, *reads] for mine in given))) is finds


@pytest.mark.parametrize(
    ("exchanged", "optimizers", "fed_by", "finds"),
    [
        ("", (1,), (), False),
        ("gathered", (1,), (), False),
        ("gradients", (1,), (), True),
        ("", (), (), True),
        ("", (0, 1), (), True),  # the wrapped model is trained, too: on what is not known,
        ("", (0, 1), (5,), False),  # on another loader's batches,
        ("", (0, 1), (0, 5), True),  # on these as well
        ("", (0,), (5,), True),
    ],
)
def test_a_model_that_each_rank_trains_for_itself(
    exchanged: str, optimizers: tuple[int, ...], fed_by: tuple[int, ...], finds: bool
) -> None:
    """A reference model on the whole data set, beside a wrapped one: nothing is averaged there."""
    mine = loader(0, [EVERYTHING], content=1, trains=False, ends={"backwards": 25})
    mine[-1:-1] = [  # before the epoch ends
        UnwrappedState(at=0, optimizer=1, step=0, gradients=1, parameters=1, exchanged=exchanged),
        *(StepDone(at=0, optimizer=n, step=0, site=4, wall_s=0.1) for n in optimizers),
        ForwardInput(
            at=0, model=0, forward=0, site=4, digest=0, numbers=8, rows=1, fed=True, loaders=fed_by
        ),
    ]
    assert bool(examine(mine, mine)) is finds


@pytest.mark.parametrize("group", [1, 0])
def test_layers_that_exchange_in_backwards_beside_groups_that_average(group: int) -> None:
    """Where all ranks average, they may hold parts of one sequence, and need equal samples."""
    states = [
        UnwrappedState(at=0, optimizer=0, step=n, gradients=1, parameters=1, group=group,
                       exchanged="in backward", complete=True) for n in range(3)
    ]  # fmt: skip
    ends = {"backwards": 25, "collectives": 50}
    run = make_run({
        r: [*prologue(4, wrapped=False, group=(r % 2, r % 2 + 2)), *states,
            *loader(0, [EVERYTHING], content=1, ends=ends)] for r in range(4)
    })  # fmt: skip
    assert bool(found(SamplerMissing(), run)) is (group == 1)


@pytest.mark.parametrize(("total", "ranks", "silent"), [
    (200, (0, 1), True),  # each sample once for each rank
    (600, (0, 1), True),  # three times
    (100, (0, 1), False),
    (200, (0, 0), False),
])  # fmt: skip
def test_a_sampler_that_repeats_each_sample_for_each_rank(
    total: int, ranks: tuple[int, int], silent: bool
) -> None:
    repeats = {"sampler": "RASampler", "own_order": True, "total_size": total, "content": 1}
    found = examine(*(loader(0, [EVERYTHING], sampler_rank=n, **repeats) for n in ranks))  # type: ignore[arg-type]
    assert (not found) is silent
