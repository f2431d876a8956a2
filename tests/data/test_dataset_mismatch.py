"""dataset-mismatch: the indices are divided well, but they stand for different samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ddpdoctor.checks.data.dataset_mismatch import DatasetMismatch
from ddpdoctor.checks.data.sampler_missing import SamplerMissing
from ddpdoctor.checks.data.sampler_seed_skew import SamplerSeedSkew
from readers import found, loader, run_of
from recordings import site

from ddpdoctor.analysis.data.audit_table import audit_table
from ddpdoctor.analysis.data.loader_faults import each_set_divides_its_own
from ddpdoctor.events import ContentRead, Event, Layer, Payload, PerProcess, Seeded
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Confidence, Finding, Severity, Steps

EVERYTHING = list(range(100))


def payload(kind: str, order: int, content: int = 0, **more: object) -> Payload:
    fields: dict[str, object] = {"name": "samples", "length": 100, **more}
    return Payload(kind=kind, order=order, content=content, **fields)  # type: ignore[arg-type]


def part(
    rank: int, *payloads: Payload, distributed: bool = True, whole: bool = False
) -> list[Event]:
    return loader(
        0,
        [EVERYTHING if whole else EVERYTHING[rank::2]],
        distributed=distributed,
        replicas=2 if distributed else -1,
        sampler_rank=rank if distributed else -1,
        total_size=100 if distributed else -1,
        payloads=payloads,
    )


def examine(first: list[Event], second: list[Event]) -> list[Finding]:
    return found(DatasetMismatch(), run_of(first, second))


def test_a_random_split_of_each_rank() -> None:
    (finding,) = examine(part(0, payload("indices", 1, 5)), part(1, payload("indices", 2, 6)))
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(("images", "rule"), [(7, "random-selection"), (0, "shuffled-lists")])
def test_labels_in_another_order_of_other_samples(images: int, rule: str) -> None:
    """As many of each class are drawn, so that the labels are the same in another order."""
    ranks = (
        part(r, payload("choice", 1 + r, 5, name="labels"),
             payload("tensor", 3 + r, images and images + r, name="images"))
        for r in range(2)
    )  # fmt: skip
    (finding,) = examine(*ranks)
    assert finding.rule == rule
    assert finding.evidence["same entries in another order"] is (not images)


@pytest.mark.parametrize(("held", "places", "each"), [
    ("abab", (0, 0, 1, 1), True), ("abab", (0, 1, 1, 0), True), ("abab", (0, 1, 0, 1), False),
    ("aaab", (0, 1, 0, 1), False), ("aaaa", (0, 1, 0, 1), False), ("ab", (0, 1), False),
])  # fmt: skip
def test_tasks_whose_data_groups_of_ranks_share(
    held: str, places: tuple[int, ...], each: bool
) -> None:
    """Each set of ranks with equal data divides all of it."""
    readers = [
        SimpleNamespace(
            seen=SimpleNamespace(
                payloads=(payload("tensor", ord(data)),), sampler_rank=place, replicas=2
            )
        )
        for data, place in zip(held, places, strict=True)
    ]
    division: Any = SimpleNamespace(readers=readers)
    assert each_set_divides_its_own(division) is each


def test_what_is_counted_are_positions() -> None:
    run = run_of(part(0, payload("indices", 1, 5)), part(1, payload("indices", 2, 6)))
    (finding,) = found(DatasetMismatch(), run)
    assert str(finding.evidence["positions read"]).startswith("100 once")
    ((table,), (same,)) = (
        audit_table(run_of(part(0, payload("indices", 1, 5)), part(1, payload("indices", n, 5))))
        for n in (2, 1)
    )
    assert table.rows[0][3:6] == ("100 (each rank its own)", "-", "-")
    assert same.rows[0][3:6] == ("100", "100", "0")


def test_a_filter_of_each_rank_is_no_random_split() -> None:
    first, second = (
        loader(
            0, [EVERYTHING[r : 100 - 2 * r : 2]], distributed=True, replicas=2, sampler_rank=r,
            total_size=100 - 2 * r, length=100 - 2 * r,
            payloads=(payload("indices", r + 1, length=100 - 2 * r),),
        )
        for r in range(2)
    )  # fmt: skip
    (finding,) = examine(first, second)
    assert finding.rule == "selections-of-unequal-length"


def test_shards_of_other_lengths_that_a_sampler_divides_once_more() -> None:
    shards = (
        loader(
            0, [EVERYTHING[r : 80 - 16 * r : 2]], distributed=True, replicas=2, sampler_rank=r,
            total_size=80 - 16 * r, length=80 - 16 * r,
            payloads=(payload("tensor", r + 1, length=80 - 16 * r),),
        )
        for r in range(2)
    )  # fmt: skip
    (finding,) = examine(*shards)
    assert finding.rule == "lists-of-unequal-length"


def test_the_parts_of_one_split_are_one_finding() -> None:
    def both(rank: int) -> list[Event]:
        digest = payload("indices", rank + 1, rank + 5, name="indices")
        common = {"layers": (Layer(data=1, site=4), Layer(data=0)), "payloads": (digest,),
                  "distributed": True, "replicas": 2, "sampler_rank": rank, "sampler_site": 1,
                  "total_size": 100}  # fmt: skip
        share = EVERYTHING[rank::2]
        return [
            *loader(0, [share], **common),  # type: ignore[arg-type]
            *loader(1, [share], dataset="Rest", loop_site=4, trains=False, **common),  # type: ignore[arg-type]
            *loader(2, [share], loop_site=5, trains=False, **common | {"length": 99}),  # type: ignore[arg-type]
        ]

    (finding,) = examine(both(0), both(1))
    assert finding.location is not None and finding.location.line == 21
    assert "sampler made here" in [r.label for r in finding.related]


def test_one_listing_beneath_two_loaders_is_one_finding() -> None:
    def both(rank: int, *orders: int) -> list[Event]:
        kinds = {"distributed": True, "replicas": 2, "sampler_rank": rank, "total_size": 100}
        return [
            event
            for n, order in enumerate(orders)
            for event in loader(
                n, [EVERYTHING[rank::2]], length=100 - n, sampler_site=n + 1, loop_site=n + 3,
                payloads=(payload("text", order + rank, 5, name="dataset.names"),), **kinds,
            )  # type: ignore[arg-type]
        ]  # fmt: skip

    (finding,) = examine(both(0, 1, 1), both(1, 1, 1))
    assert finding.rule == "listing-order"
    assert len(examine(both(0, 1, 7), both(1, 1, 7))) == 2, "two listings"


@pytest.mark.parametrize(
    ("text", "split"),
    [("DataLoader(Subset(ds, chosen))", False), ("a, b = random_split(ds, [80, 20])", True)],
)
def test_indices_that_the_program_makes_itself(text: str, split: bool) -> None:
    line = site(9, "train.py", 15, text)
    first, second = (
        [line, *loader(
            0, [EVERYTHING[r::2]], distributed=True, replicas=2, sampler_rank=r, total_size=100,
            payloads=(payload("indices", r + 1, r + 5, name="indices"),),
            layers=(Layer(data=1, site=9), Layer(data=0)),
        )]
        for r in range(2)
    )  # fmt: skip
    (finding,) = examine(first, second)
    assert finding.rule == ("random-split" if split else "random-indices")


def test_the_rank_that_is_alone_is_named() -> None:
    digests = (1, 1, 7, 1)
    ranks = [
        loader(
            0, [EVERYTHING[r::4]], distributed=True, replicas=4, sampler_rank=r, total_size=100,
            payloads=(payload("indices", digest),),
        )
        for r, digest in enumerate(digests)
    ]  # fmt: skip
    (finding,) = found(DatasetMismatch(), run_of(*ranks))
    assert finding.ranks == (2,)
    assert finding.evidence["distinct selections"] == "ranks 0-1,3 | rank 2"


def test_a_listing_in_another_order() -> None:
    (finding,) = examine(part(0, payload("text", 1, 5)), part(1, payload("text", 2, 5)))
    assert finding.severity is Severity.ERROR


def test_a_list_of_ids_chosen_by_each_rank() -> None:
    (finding,) = examine(part(0, payload("choice", 1, 5)), part(1, payload("choice", 2, 6)))
    assert finding.severity is Severity.ERROR
    assert finding.confidence is Confidence.PROVEN
    assert finding.steps == Steps(0, 1, 2)
    (finding,) = examine(part(0, payload("choice", 1, 5)), part(1, payload("choice", 2, 5)))


def test_ids_of_each_rank_s_part_read_whole() -> None:
    first, second = (
        part(r, payload("choice", r + 1), distributed=False, whole=True) for r in range(2)
    )  # fmt: skip
    assert not examine(first, second)


def test_tensors_permuted_by_each_rank() -> None:
    (finding,) = examine(part(0, payload("tensor", 1, 5)), part(1, payload("tensor", 2, 5)))
    assert finding.severity is Severity.ERROR


def test_numbers_made_up_by_each_rank_are_a_note() -> None:
    (finding,) = examine(part(0, payload("tensor", 1, 5)), part(1, payload("tensor", 2, 6)))
    assert finding.severity is Severity.NOTE


def holding(rank: int, first: int, kinds: int = 100) -> list[Event]:
    """Tensors of the rank's own; sample `i` of them holds the number `first + i`."""
    events, indices = part(rank, payload("tensor", rank + 1)), EVERYTHING[rank::2]
    values = pack(first + i % kinds for i in indices)
    read = ContentRead(at=0, loader=0, epoch=0, batches=pack(i // 8 for i in indices),
                       columns=(values,), indices=pack(indices))  # fmt: skip
    return [*events[:2], read, *events[2:]]


def test_tensors_that_each_rank_chose_from_the_same() -> None:
    (finding,) = examine(holding(0, 1), holding(1, 2))
    assert finding.severity is Severity.ERROR and finding.confidence is Confidence.PROVEN
    assert finding.evidence["same samples at other indices"] == "49 of 50"
    for other in (holding(1, 1000), holding(1, 90)):  # none, and a few in common
        (finding,) = examine(holding(0, 1), other)
        assert finding.severity is Severity.NOTE
    (finding,) = examine(holding(0, 1, kinds=7), holding(1, 2, kinds=7))
    assert finding.severity is Severity.NOTE, "samples that are alike"


def test_a_sharded_sampler_of_ones_own() -> None:
    first, second = (
        part(r, payload("indices", r + 1), distributed=False) for r in range(2)
    )  # fmt: skip
    (finding,) = examine(first, second)
    assert finding.severity is Severity.ERROR


def test_shards_made_by_hand_and_read_whole() -> None:
    first, second = (
        part(r, payload("text", r + 1), distributed=False, whole=True) for r in range(2)
    )  # fmt: skip
    assert not examine(first, second)


@pytest.mark.parametrize("lengths", [(64, 32), (64, 64)])
def test_loaders_of_one_line_that_ranks_begin_in_another_order(lengths: tuple[int, int]) -> None:
    def rank(number: int) -> list[Event]:
        found: list[Event] = []
        for turn, made in enumerate((0, 1) if number == 0 else (1, 0)):
            length = lengths[made]
            found += loader(
                turn, [list(range(number, length, 2))], length=length, total_size=length,
                distributed=True, replicas=2, sampler_rank=number, made=made,
                payloads=(payload("tensor", 5 + made, length=length),), content=made,
                began={"seed": made}, seed=made, shuffle=True,
            )  # fmt: skip
        return found

    run = run_of(rank(0), rank(1))
    assert not found(DatasetMismatch(), run)
    assert not found(SamplerSeedSkew(), run)


@pytest.mark.parametrize("entries", [3, 4, 5, 7])
@pytest.mark.parametrize("listed", [True, False])
def test_small_shards_made_by_hand_and_read_whole(entries: int, listed: bool) -> None:
    def shard(rank: int) -> list[Event]:
        own = list(range(len(range(rank, entries, 2))))
        held = (payload("tensor", 5 + rank, length=len(own)),) * listed
        return loader(0, [own], length=len(own), trains=False, payloads=held, content=rank + 1,
                      batch_size=1)  # fmt: skip

    run = run_of(shard(0), shard(1))
    assert not found(DatasetMismatch(), run)
    assert not found(SamplerMissing(), run)


@pytest.mark.parametrize(("seen", "told"), [(1, 0), (2, 1)])
def test_samples_that_are_not_made_of_what_differs(seen: int, told: int) -> None:
    """What stands at equal indices is the same on both ranks."""
    share = {"distributed": True, "replicas": 2, "total_size": 100}
    ranks = [
        loader(
            0, [EVERYTHING[rank::2], EVERYTHING[1 - rank :: 2]], sampler_rank=rank,
            payloads=(payload("text", 1 + rank, 5),), content=1 + rank * (seen - 1), **share,
        )  # type: ignore[arg-type]
        for rank in range(2)
    ]  # fmt: skip
    assert len(examine(*ranks)) == told


def test_data_sets_that_agree() -> None:
    assert not examine(part(0, payload("text", 1)), part(1, payload("text", 1)))


def test_nothing_known_of_the_data_set() -> None:
    assert not examine(part(0), part(1))


def remade(rank: int, indices: Sequence[int], step: int = 10) -> list[Event]:
    """A loader that is made anew in every epoch, with the digests of what its data set indexes; 0
    where it was not looked at."""
    return [
        event
        for n, order in enumerate(indices)
        for event in loader(
            n, [EVERYTHING[rank::3]], distributed=True, replicas=3, sampler_rank=rank,
            total_size=102, made=n, began={"step": step * n},
            payloads=(payload("indices", order),) if order else (),
        )
    ]  # fmt: skip


def test_a_split_that_only_later_differs_on_one_rank() -> None:
    others = [remade(r, [1, 1, 1, 1]) for r in range(2)]
    (finding,) = found(DatasetMismatch(), run_of(*others, remade(2, [1, 1, 2, 2])))
    assert finding.ranks == (2,) and finding.rule == "random-split"
    assert not found(DatasetMismatch(), run_of(*others, remade(2, [1, 1, 1, 1])))
    some = [remade(r, [1, 1, 0, 1, 0]) for r in range(2)]
    assert found(DatasetMismatch(), run_of(*some, remade(2, [1, 1, 0, 2, 0])))
    assert not found(DatasetMismatch(), run_of(*some, remade(2, [1, 1, 0, 1, 0])))
    drawn = [remade(r, [1, 1, 2, 2]) for r in range(3)]
    assert not found(DatasetMismatch(), run_of(*drawn))


def test_loaders_of_other_moments_are_not_compared() -> None:
    """The rank is one epoch ahead: it already reads the next split."""
    others = [remade(r, [1, 1, 1, 2]) for r in range(2)]
    assert not found(DatasetMismatch(), run_of(*others, remade(2, [1, 1, 2], step=15)))


def test_random_entries_of_each_rank_are_no_listing() -> None:
    (finding,) = examine(part(0, payload("tensor", 1, 5)), part(1, payload("tensor", 2, 6)))
    assert (finding.severity, finding.rule) == (Severity.NOTE, "own-entries")
    assert finding.evidence["kind"] == "tensors"
    (listed,) = examine(part(0, payload("text", 1, 5)), part(1, payload("text", 2, 6)))
    assert (listed.severity, listed.rule) == (Severity.ERROR, "listing-order")


@pytest.mark.parametrize(("one", "other", "partly"), [
    ([*range(16)], [*range(13), 71, 72, 73], True),
    ([*range(16)], [0, 1, *range(50, 64)], False),
    ([*range(4), *[9] * 12], [*range(4, 8), *[9] * 12], False),  # the rest is padding
])  # fmt: skip
def test_entries_of_which_each_rank_made_a_part(
    one: list[int], other: list[int], partly: bool
) -> None:
    (finding,) = examine(
        part(0, payload("tensor", 1, 5, pieces=pack(one))),
        part(1, payload("tensor", 2, 6, pieces=pack(other))),
    )
    rule = "partly-own-entries" if partly else "own-entries"
    assert finding.rule == rule
    assert finding.severity is (Severity.ERROR if partly else Severity.NOTE)
    assert ("13 of 16 parts" in finding.cause) is partly


def test_a_batch_that_was_looked_at_first_is_not_the_loop() -> None:
    ranks = []
    for rank in range(2):
        peek, real = [0], EVERYTHING[rank::2]
        events = loader(
            0, [peek, real], loop_site=4, distributed=True, replicas=2, sampler_rank=rank,
            total_size=100, payloads=(payload("indices", rank, 5 + rank),),
            ends={"exhausted": [False, True]},
        )  # fmt: skip
        ranks.append(events)
    (finding,) = examine(*ranks)
    assert [(r.label, r.location.line) for r in finding.related] == [("iterated here", 20)]


Labelled = Callable[[int, int], int]
"""The label of a sample in an epoch."""


def labelled(
    rank: int, label: Labelled, *, kinds: str = "-n", epochs: int = 3, **more: object
) -> list[Event]:
    """A rank's share of three epochs of 96 samples, with inputs and labels."""
    orders = [random.Random(n).sample(range(96), 96)[rank::2] for n in range(epochs)]
    fields: dict[str, object] = {"distributed": True, "replicas": 2, "sampler_rank": rank,
                                 "total_size": 96, "shuffle": True, "length": 96}  # fmt: skip
    events = loader(0, orders, **fields | more)  # type: ignore[arg-type]
    for epoch, order in enumerate(orders):
        labels = [label(index, epoch) + 1 for index in order]
        read = ContentRead(at=0, loader=0, epoch=epoch, indices=pack(order), numbers=kinds,
                           batches=pack(n // 4 for n in range(len(order))),
                           columns=(pack(1000 + i for i in order), pack(labels)))  # fmt: skip
        events.append(read)
    return events


def by_class(index: int, epoch: int = 0) -> int:
    return index * 7 % 8


def numbered_otherwise(index: int, epoch: int = 0) -> int:
    return (by_class(index) * 3 + 1) % 8


def test_classes_that_each_rank_numbers_by_itself() -> None:
    (finding,) = examine(labelled(0, by_class), labelled(1, numbered_otherwise))
    assert (finding.rule, finding.ranks) == ("other-labels", (0, 1))
    assert finding.location is not None and finding.location.line == 11
    assert not examine(labelled(0, by_class), labelled(1, by_class))


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([("hash", 1), ("shuffle", 4)], "train.py:21 shuffles them"),
        ([("listing", 4)], "train.py:21 lists them in the order of the file system"),
        ([("set", 1), ("shuffle", 4)], "each rank lists or makes the entries by itself"),
    ],
)
def test_the_line_that_orders_them(lines: list[tuple[str, int]], cause: str) -> None:
    causes = tuple(PerProcess(how, line) for how, line in lines)
    share = {"distributed": True, "replicas": 2, "total_size": 100, "per_process": causes}
    ranks = (
        loader(0, [EVERYTHING[rank::2]], sampler_rank=rank,
               payloads=(payload("text", 1 + rank, 5),), **share)  # type: ignore[arg-type]
        for rank in range(2)
    )  # fmt: skip
    (finding,) = examine(*ranks)
    assert (finding.rule, finding.cause.startswith(cause)) == ("listing-order", True)
    told = [r.location.line for r in finding.related if r.label == "orders them"]
    assert told == [21] * ("train.py" in cause)


@pytest.mark.parametrize(("how", "rule"), [("hash", "hashed-labels"), ("set", "labels-from-a-set")])
def test_the_line_that_numbers_them(how: str, rule: str) -> None:
    lines = (PerProcess(how, 4),)
    ranks = (by_class, numbered_otherwise)
    (finding,) = examine(*(labelled(r, f, per_process=lines) for r, f in enumerate(ranks)))
    assert finding.rule == rule
    assert finding.location is not None and finding.location.line == 21


def test_numbers_that_seldom_occur_twice() -> None:
    ranks = (lambda i, _: i // 2 * 31 % 997, lambda i, _: i // 2 * 57 % 991)
    (finding,) = examine(*(labelled(r, f) for r, f in enumerate(ranks)))
    assert finding.rule == "other-labels"


def test_numbers_that_each_rank_draws_once_for_each_sample() -> None:
    draws = [random.Random(rank) for rank in range(2)]
    drawn = [[draw.randrange(60) for _ in range(96)] for draw in draws]
    lines = (PerProcess("hash", 4),)
    assert not examine(*(labelled(r, lambda i, _, mine=mine: mine[i], per_process=lines)
                         for r, mine in enumerate(drawn)))  # type: ignore[misc]  # fmt: skip


def test_numbers_that_differ_rightly() -> None:
    draw = random.Random(5)
    pairs: list[tuple[Labelled, Labelled]] = [
        (lambda _, epoch: epoch, lambda _, epoch: epoch),
        (lambda i, epoch: (by_class(i) + epoch) % 8, lambda i, epoch: (by_class(i) + epoch) % 8),
        (lambda _i, _e: 0, lambda _i, _e: 1),
        (lambda _i, _e: draw.randrange(8), lambda _i, _e: draw.randrange(8)),
        (lambda i, _: by_class(i) ^ (i == 3), by_class),
    ]
    for number, (one, other) in enumerate(pairs):
        assert not examine(labelled(0, one), labelled(1, other)), number
    assert not examine(*(labelled(r, f, kinds="--") for r, f in
                         enumerate((by_class, numbered_otherwise))))  # fmt: skip
    assert not examine(*(labelled(r, f, epochs=1) for r, f in
                         enumerate((by_class, numbered_otherwise)))), "no common index"  # fmt: skip


def test_shards_of_each_rank_have_labels_of_their_own() -> None:
    own = {"distributed": False, "replicas": -1, "sampler_rank": -1, "total_size": -1}
    one, other = labelled(0, by_class, **own), labelled(1, numbered_otherwise, **own)
    shifted = [
        msgspec.structs.replace(e, columns=(pack(5000 + n for n in range(48)), e.columns[1]))
        if isinstance(e, ContentRead) else e
        for e in other
    ]  # fmt: skip
    assert not examine(one, shifted)


def test_labels_in_a_tensor_of_the_data_set() -> None:
    ranks = (by_class, numbered_otherwise)
    held = [(payload("tensor", n, 7, name="tensors[1]"),) for n in range(2)]
    (finding,) = examine(*(labelled(r, f, payloads=held[r]) for r, f in enumerate(ranks)))
    assert finding.rule == "other-labels"


@pytest.mark.parametrize(
    ("how", "seeds", "lines", "told"),
    [
        ("shuffle", ("0", "1"), (4, 4), True),
        ("shuffle", ("0", "0"), (4, 4), False),
        ("shuffle", ("0", "1"), (4, 3), False),  # each rank at a line of its own
        ("listing", ("0", "1"), (4, 4), False),
    ],
)
def test_the_line_that_seeds_each_rank_differently(
    how: str, seeds: tuple[str, str], lines: tuple[int, int], told: bool
) -> None:
    share = {"distributed": True, "replicas": 2, "total_size": 100,
             "per_process": (PerProcess(how, 1),)}  # fmt: skip
    ranks = (
        [
            Seeded(at=0, generator="torch", seed=seeds[rank], site=lines[rank]),
            *loader(0, [EVERYTHING[rank::2]], sampler_rank=rank,
                    payloads=(payload("text", 1 + rank, 5),), **share),  # type: ignore[arg-type]
        ]
        for rank in range(2)
    )  # fmt: skip
    (finding,) = examine(*ranks)
    assert ("seeds each rank differently" in finding.cause) is told
    assert [r.location.line for r in finding.related if "seeds" in r.label] == [21] * told


def test_two_datasets_that_one_line_orders() -> None:
    share = {"distributed": True, "replicas": 2, "total_size": 100,
             "per_process": (PerProcess("shuffle", 4),)}  # fmt: skip

    def events(rank: int) -> list[Event]:
        made = [
            loader(n, [EVERYTHING[rank::2]], sampler_rank=rank, sampler_site=1 + n,
                   payloads=(payload("text", 1 + rank + 2 * n, 5),), **share)  # type: ignore[arg-type]
            for n in range(2)
        ]  # fmt: skip
        return [event for one in made for event in one]

    (finding,) = examine(events(0), events(1))
    assert "train.py:21" in finding.cause
