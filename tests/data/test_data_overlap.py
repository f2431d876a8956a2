"""data-overlap: streams and samplers, judged by what was delivered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
from ddpdoctor.checks.data.data_overlap import DataOverlap
from ddpdoctor.checks.data.sampler_missing import SamplerMissing
from ddpdoctor.checks.data.sampler_rank_mismatch import SamplerRankMismatch
from readers import found, loader, prologue, run_of, shuffled
from recordings import make_run

from ddpdoctor.events import (
    CallBlock,
    CallRun,
    ContentRead,
    EpochBegan,
    Event,
    GroupReady,
    Payload,
    PerProcess,
    RowsRead,
    Signature,
)
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.run import Run


def stream(batches: Sequence[Sequence[int]], *, workers: int = 0, **more: object) -> list[Event]:
    """An iterable data set that delivered these samples (numbers stand for content)."""
    events = loader(
        0,
        [[]],
        length=-1,
        iterable=True,
        sampler="_InfiniteConstantSampler",
        workers=workers,
        ends={"batches": len(batches), "samples": sum(map(len, batches)),
              "backwards": int(bool(more.get("trains", True))), "collectives": 99},
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    rows = [(n, value) for n, batch in enumerate(batches) for value in batch]
    read = ContentRead(
        at=0,
        loader=0,
        epoch=0,
        batches=pack(n for n, _ in rows),
        columns=(pack(v for _, v in rows),),
    )
    return [*events[:-1], read, events[-1]]


def examine(*ranks: Sequence[Event]) -> list[Finding]:
    return found(DataOverlap(), run_of(*ranks))


def listing(files: Sequence[int]) -> tuple[Payload, ...]:
    return (Payload(name="files", kind="text", length=len(files), order=1, pieces=pack(files)),)


@pytest.mark.parametrize(("first", "second", "several"), [
    ([*range(8)], [*range(5, 13)], 3),
    ([*range(8)], [*range(8)], 0),  # each takes its samples of every file
    ([*range(8)], [*range(8, 16)], 0),
    ([*range(8)], [*range(7, 15)], 0),  # one fills the list up
    ([*range(8)], [*range(4)], 0),  # one rank reads all of them
])  # fmt: skip
def test_lists_of_files_that_overlap(first: list[int], second: list[int], several: int) -> None:
    ranks = [
        stream(batches, listed=listing(files))
        for batches, files in ((COUNTING, first), (OTHERS, second))
    ]
    told = examine(*ranks)
    assert [f.rule for f in told] == (["overlapping-lists"] if several else [])
    for finding in told:
        assert f"{several} of 13" in finding.summary
        assert "`files`" in finding.cause


@pytest.mark.parametrize(("how", "second", "rule", "fix"), [
    ("set", [*range(5, 13)], "overlapping-lists", "sorted("),
    ("hash", [*range(5, 13)], "overlapping-lists", "zlib.crc32("),
    ("", [*range(5, 13)], "", ""),
    ("set", [*range(8, 16)], "", ""),
])  # fmt: skip
def test_a_list_of_each_rank_in_an_order_of_its_process(
    how: str, second: list[int], rule: str, fix: str
) -> None:
    """Where nothing in the source makes the order, each rank may well have what it chose."""
    causes = (PerProcess(how, 4),) if how else ()
    ranks = [
        loader(
            0, [[*range(8)]], length=8, content=number, listed=listing(files), per_process=causes
        )
        for number, files in enumerate(([*range(8)], second))
    ]
    told = found(DataOverlap(), run_of(*ranks))
    assert [f.rule for f in told] == [rule] * bool(rule)
    for finding in told:
        assert finding.location is not None and finding.location.line == 21
        assert fix in finding.fix


COUNTING = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
OTHERS = [[n + 100 for n in batch] for batch in COUNTING]


def test_a_stream_that_no_rank_splits() -> None:
    (finding,) = examine(stream(COUNTING), stream(COUNTING))
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 11


def test_the_same_files_in_another_order() -> None:
    (finding,) = examine(stream(COUNTING), stream(COUNTING[::-1]))
    assert finding.rule == "unsharded-stream"


def test_only_the_ranks_that_share() -> None:
    (finding,) = examine(stream(COUNTING), stream(OTHERS), stream(COUNTING))
    assert finding.ranks == (0, 2)


def test_fewer_parts_than_ranks() -> None:
    """To divide the part of each rank once more would leave samples unread."""
    (finding,) = examine(stream(COUNTING), stream(OTHERS), stream(COUNTING))
    assert (finding.rule, finding.ranks) == ("repeated-parts", (0, 2))
    (finding,) = examine(*[stream(COUNTING), stream(OTHERS)] * 2)
    assert (finding.rule, finding.ranks) == ("repeated-parts", (0, 1, 2, 3))
    (finding,) = examine(*[stream(COUNTING)] * 3)
    assert finding.rule == "unsharded-stream"


def test_parts_that_cannot_be_told_apart() -> None:
    """The third has a quarter in common with the others, which is no part of its own."""
    (finding,) = examine(*[stream(COUNTING)] * 2, stream([[1, 2, 3, 104], *OTHERS[1:]]))
    assert finding.ranks == (0, 1)


def test_only_the_ranks_whose_shares_overlap() -> None:
    shares = [range(25), range(25, 50), range(25), range(49, 75)]
    more = {"sampler": "MySampler", "content": 1}
    ranks = [loader(0, [list(share)], **more) for share in shares]  # type: ignore[arg-type]
    (finding,) = examine(*ranks)
    assert finding.ranks == (0, 2)


def test_streams_of_their_own() -> None:
    assert not examine(stream(COUNTING), stream(OTHERS))


def test_streams_drawn_with_replacement_from_one_seed() -> None:
    """No rank comes to an end, and samples come again: the draws are the same all the same."""

    def drawn(seed: int) -> list[Event]:
        generator = random.Random(seed)
        batches = [[generator.randrange(1, 13) for _ in range(4)] for _ in range(16)]
        return stream(batches, exhausted=False)

    (finding,) = examine(drawn(0), drawn(0))
    assert (finding.rule, finding.ranks) == ("equal-draws", (0, 1))
    assert not examine(drawn(0), drawn(1))


def test_samples_that_are_all_alike_tell_nothing() -> None:
    alike = [[7, 7, 7, 7]] * 3
    assert not examine(stream(alike), stream(alike))


def test_a_few_samples_in_common() -> None:
    assert not examine(stream(COUNTING), stream([[1, 2, 103, 104], *OTHERS[1:]]))


def test_evaluation_is_a_note() -> None:
    (finding,) = examine(*([stream(COUNTING, trains=False)] * 2))
    assert finding.severity is Severity.NOTE


def test_workers_of_one_rank() -> None:
    twice = [batch for batch in COUNTING for _ in range(2)]
    others = [batch for batch in OTHERS for _ in range(2)]
    (finding,) = examine(stream(twice, workers=2), stream(others, workers=2))
    assert finding.rule == "unsharded-workers"
    assert "samples compared" in str(finding.evidence["delivered by several workers"])
    (finding,) = examine(stream(twice, workers=2), stream(twice, workers=2))
    assert finding.evidence["workers of one rank overlap too"] is True


def test_a_division_among_workers_is_extended_by_the_rank() -> None:
    """A second division on top of it would leave samples unread."""
    (finding,) = examine(stream(COUNTING, workers=2), stream(COUNTING, workers=2))
    assert finding.evidence["workers of one rank overlap too"] is False
    (finding,) = examine(stream(COUNTING, workers=1), stream(COUNTING, workers=1))


def test_workers_that_split() -> None:
    assert not examine(stream(COUNTING, workers=2), stream(OTHERS, workers=2))


def rows_of(*epochs: Sequence[int], workers: int = 0, exhausted: bool = True) -> list[Event]:
    """A stream that made its batches of 4 rows itself."""
    ends = {"batches": [-(-len(e) // 4) for e in epochs], "collectives": 99}
    events = loader(0, [[]] * len(epochs), length=-1, iterable=True, workers=workers, ends=ends,
                    sampler="_InfiniteConstantSampler", exhausted=exhausted)  # fmt: skip
    return events + [
        RowsRead(at=0, loader=0, epoch=n, batches=pack(i // 4 for i in range(len(e))), rows=pack(e))
        for n, e in enumerate(epochs)
    ]


def test_streams_that_each_rank_shuffles_for_itself() -> None:
    (finding,) = examine(rows_of(shuffled(1), shuffled(2)), rows_of(shuffled(3), shuffled(4)))
    assert finding.rule == "unsharded-stream"
    assert examine(rows_of(shuffled(1)[:36]), rows_of(shuffled(3)[:36])), "the last batch dropped"


@pytest.mark.parametrize(
    "other",
    [
        rows_of(shuffled(2, 101)),
        rows_of([*shuffled(2)[:30], *shuffled(2, 101)[:10]]),
        rows_of(random.Random(2).choices(range(1, 41), k=40)),
        rows_of(shuffled(2), shuffled(3, 101)),
        rows_of(shuffled(2), exhausted=False),
        rows_of(shuffled(2)[:20]),
        rows_of([*shuffled(2), *[7] * 8]),
        rows_of([0, *shuffled(2)[1:]]),
    ],
    ids=["other", "partly", "with replacement", "not again", "left", "part", "filled", "on device"],
)
def test_rows_that_are_not_one_pass_over_the_same(other: list[Event]) -> None:
    assert not examine(rows_of(shuffled(1), shuffled(4)), other)


def test_workers_that_each_shuffle_what_the_rank_reads() -> None:
    def two(seed: int, first: int) -> list[int]:
        return [
            row
            for n in range(0, 40, 4)
            for s in (seed, seed + 1)
            for row in shuffled(s, first)[n : n + 4]
        ]

    mine, yours = rows_of(two(1, 1), workers=2), rows_of(two(3, 101), workers=2)
    (finding,) = examine(mine, yours)
    assert finding.rule == "unsharded-workers"
    assert not examine(mine, rows_of(shuffled(1, 201, 80), workers=2))


def test_a_sampler_of_ones_own_whose_shares_overlap() -> None:
    shares = [list(range(60)), list(range(40, 100))]
    ranks = [loader(0, [s], content=1, sampler="Shares") for s in shares]
    (finding,) = examine(*ranks)
    assert finding.rule == "overlapping-shares"


def shares(*epochs: range) -> list[Event]:
    return loader(0, [list(e) for e in epochs], length=110, content=1, sampler="Shares")


def test_a_sampler_of_ones_own_that_shuffles_otherwise_on_each_rank() -> None:
    mine, yours = shares(range(50), range(20, 70)), shares(range(30, 80), range(60, 110))
    (finding,) = examine(mine, yours)
    assert finding.evidence["shared samples by epoch"] == [20, 10]
    (finding,) = examine(shares(range(60), range(60)), shares(range(40, 100), range(40, 100)))


def batched(*epochs: Sequence[int], length: int = 400, **more: object) -> list[Event]:
    """Batches of ten that a batch sampler of one's own hands out: the loader knows no size."""
    events = loader(0, epochs, length=length, batch_size=10, content=1, sampler="BatchShards",
                    own_order=True, **more)  # type: ignore[arg-type]  # fmt: skip
    return [msgspec.structs.replace(events[0], batch_size=None), *events[1:]]


def part(order: Sequence[int], rank: int, world: int = 2) -> list[int]:
    """Every n-th batch of one order; the last round is filled up from the first batches."""
    batches = [list(order[n : n + 10]) for n in range(0, len(order), 10)]
    batches += [list(order[:10])] * (-len(batches) % world)
    short = 10 - len(batches[-1])
    batches[-1] = [*batches[-1], *order[:short]]
    return [i for batch in batches[rank::world] for i in batch]


@pytest.mark.parametrize("trains", [True, False])
def test_what_fills_up_the_last_batch_is_no_overlap(trains: bool) -> None:
    ranks = [part(range(157), r) for r in range(2)]
    assert not examine(*(batched(p, length=157, trains=trains) for p in ranks))
    wide = range(100), range(57, 157)
    assert examine(*(batched(p, length=157, trains=trains) for p in wide))


def test_shares_of_orders_of_their_own_that_are_filled_up() -> None:
    """What fills up comes twice on one rank, as a few of what is drawn with replacement do."""
    (finding,) = examine(
        batched(*(part(shuffled(s, 0, 397), 0) for s in (1, 2)), length=397),
        batched(*(part(shuffled(s, 0, 397), 1) for s in (3, 4)), length=397),
    )
    assert finding.severity is Severity.ERROR
    assert finding.evidence["samples by rank"] == {0: 200, 1: 200}


def distributed(*epochs: Sequence[int], rank: int, batches: int = 40) -> list[Event]:
    """As `batched`, by a `DistributedSampler` over batches: its sizes are numbers of batches."""
    events = batched(*epochs, replicas=2, sampler_rank=rank, distributed=True)
    seen = msgspec.structs.replace(events[0], total_size=batches, sampler_length=batches // 2)
    return [seen, *events[1:]]


def test_batches_that_a_distributed_sampler_fills_up() -> None:
    order = [*range(390), *range(380, 390), *range(390, 400)]
    assert not examine(*(distributed(order[200 * r : 200 * r + 210], rank=r) for r in range(2)))
    more = [*range(240)], [*range(160, 400)]
    (finding,) = examine(*(distributed(m, rank=r) for r, m in enumerate(more)))
    assert finding.rule == "overlapping-shares"


def test_shares_of_lists_of_batches_that_differ() -> None:
    mine, yours = (part(shuffled(seed, 0, 400), seed) for seed in range(2))
    (finding,) = examine(distributed(mine, rank=0), distributed(yours, rank=1))
    assert finding.rule == "different-shuffles"
    assert "samples are in none" in finding.cause


@pytest.mark.parametrize(("states", "says"), [
    (((1, 1), (2, 3)), True),
    (((1, 4), (2, 3)), False),  # never the same
    (((1, 1), (2, 2)), False),
])  # fmt: skip
def test_generators_that_part_between_two_epochs(
    states: tuple[tuple[int, int], ...], says: bool
) -> None:
    ranks = []
    for rank in range(2):
        own = [part(shuffled(0, 0, 400), rank), part(shuffled(1 + rank, 0, 400), rank)]
        events = batched(*own)
        for epoch, state in enumerate(states):
            n = next(
                n for n, e in enumerate(events) if isinstance(e, EpochBegan) and e.epoch == epoch
            )
            events[n] = msgspec.structs.replace(events[n], random=(state[rank], 7, 8 + rank))
        ranks.append(events)
    (finding,) = examine(*ranks)
    assert finding.rule == "different-shuffles"
    assert ("torch's random state was the same" in finding.cause) is says


def test_samples_that_come_twice_on_purpose() -> None:
    drawn = [random.Random(seed).choices(range(400), k=200) for seed in range(2)]
    assert not examine(*map(batched, drawn))
    by_all = random.Random(1).choices(range(400), k=400)
    assert not examine(*(batched(part(by_all, r)) for r in range(2)))
    rare = random.Random(2).sample([*range(100, 400), *range(60), *range(40)], 400)
    assert not examine(*(batched(part(rare, r)) for r in range(2)))


def parts(*content: int, group: Sequence[int] = (), trains: bool = True) -> Run:
    """Each rank reads all of the part that it holds."""
    known = GroupReady(at=0, group=1, name="1", backend="gloo", ranks=tuple(group), member=True,
                       site=-1)  # fmt: skip
    own = [
        loader(0, [shuffled(r, 0)], length=40, content=n, trains=trains)
        for r, n in enumerate(content)
    ]
    return run_of(*([*([known] if r in group else []), *e] for r, e in enumerate(own)))


def test_ranks_that_hold_the_same_part() -> None:
    (finding,) = found(DataOverlap(), parts(1, 1, 2, 2))
    assert finding.severity is Severity.ERROR and finding.ranks == (0, 1, 2, 3)
    assert not found(SamplerMissing(), parts(1, 1, 2, 2)), "not one data set"
    (finding,) = found(DataOverlap(), parts(1, 2, 1))
    assert finding.ranks == (0, 2)


def test_parts_that_are_meant() -> None:
    assert not found(DataOverlap(), parts(1, 2, 3, 4))
    assert not found(DataOverlap(), parts(1, 1, 2, 3, group=(0, 1))), "a group that shares a part"
    assert not found(DataOverlap(), parts(1, 1, 2, 2, trains=False))
    (finding,) = found(SamplerMissing(), parts(1, 1, 1))
    assert finding.ranks == (0, 1, 2)


def divided(group: Callable[[int], tuple[int, int]], *more: Event, place: str = "//") -> Run:
    """Four ranks, two by two, through samplers that divide the data over two."""
    everything = list(range(100))
    events: dict[int, list[Event]] = {}
    for r in range(4):
        mine = r // 2 if place == "//" else r % 2
        read = loader(0, [everything[mine::2]], content=1, distributed=True, replicas=2,
                      sampler_rank=mine, sampler="DistributedSampler", total_size=100)  # fmt: skip
        events[r] = [*prologue(4, wrapped=False, group=group(r)), *more, *read]
    return make_run(events)


def sums(group: int) -> list[Event]:
    return [
        Signature(at=0, id=0, op="all_reduce", numel=128),
        CallBlock(at=0, id=0, codes=(0, 0)),
        CallRun(at=0, group=group, first=0, block=0, repeat=25),
    ]


@pytest.mark.parametrize(
    "group",
    [
        lambda r: (r % 2, r % 2 + 2),  # stages of a pipeline: gradients are averaged with these
        lambda r: (r // 2 * 2, r // 2 * 2 + 1),  # a tensor-parallel pair
    ],
)
def test_ranks_that_are_given_the_same_part_on_purpose(
    group: Callable[[int], tuple[int, int]],
) -> None:
    assert not found(DataOverlap(), divided(group, *sums(1)))


def test_a_part_for_each_place_in_a_node_where_all_ranks_are_averaged() -> None:
    run = divided(lambda r: (r // 2 * 2, r // 2 * 2 + 1), *sums(0), place="%")
    assert not found(DataOverlap(), run)
    (finding,) = found(SamplerRankMismatch(), run)
    assert finding.ranks == (0, 1, 2, 3)


def test_shares_that_overlap_within_a_group_that_divides_the_data() -> None:
    """Two groups of two, and the ranks of one read a quarter together."""
    events: dict[int, list[Event]] = {}
    for r, share in {0: (0, 50), 1: (0, 50), 2: (50, 100), 3: (25, 75)}.items():
        read = loader(
            0,
            [range(*share)],
            content=1,
            distributed=True,
            replicas=2,
            sampler_rank=r // 2,
            sampler="DistributedSampler",
            total_size=99,
        )
        group = (r % 2, r % 2 + 2)
        events[r] = [*prologue(4, wrapped=False, group=group), *sums(1), *read]
    (finding,) = found(DataOverlap(), make_run(events))
    assert finding.ranks == (1, 3)


@pytest.mark.parametrize(
    ("later", "epoch"),
    [
        ((COUNTING, COUNTING, OTHERS), None),
        ((OTHERS, COUNTING, COUNTING), 2),
        ((OTHERS, OTHERS, COUNTING), 3),
        ((OTHERS, COUNTING, COUNTING[::-1]), 2),
        ((OTHERS, COUNTING[:1] + OTHERS[1:], COUNTING[:1] + OTHERS[1:]), None),
    ],
)
def test_a_stream_that_no_rank_splits_any_more(
    later: Sequence[Sequence[Sequence[int]]], epoch: int | None
) -> None:
    def epochs(of: Sequence[Sequence[Sequence[int]]]) -> list[Event]:
        every: list[Event] = []
        for number, batches in enumerate(of):
            events = stream(batches)
            every += [
                msgspec.structs.replace(
                    e, at=10.0 * number, epoch=number,
                    **({"step": 10 * number} if isinstance(e, EpochBegan) else {}),
                )
                for e in events
                if hasattr(e, "epoch")
            ] if number else events  # fmt: skip
        return every

    told = examine(epochs([COUNTING] * 4), epochs([OTHERS, *later]))
    assert len(told) == (epoch is not None)
    for finding in told:
        assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([[(r + 4 * t) // 3 for t in range(30)] for r in range(4)], False),
        ([[r // 2 + 2 * t for t in range(30)] for r in range(4)], True),  # pairs of ranks
        ([[(30 * r + t) % 120 for t in range(60)] for r in range(4)], True),  # twice as much each
    ],
    ids=["repeated augmentation", "the same for two ranks", "windows that overlap"],
)
def test_samples_that_are_dealt_out_several_times_on_purpose(
    shares: list[list[int]], told: bool
) -> None:
    ranks = [loader(0, [share], length=120, content=1, sampler="Repeated") for share in shares]
    assert bool(examine(*ranks)) is told


def test_a_sampler_that_gives_each_rank_most_of_the_data() -> None:
    shares = [[(7 * n) % 100 for n in range(75)], [(3 * n) % 100 for n in range(72)]]
    ranks = [loader(0, [share], length=100, content=1, sampler="BySpeaker") for share in shares]
    (finding,) = examine(*ranks)
    assert (finding.rule, finding.severity.value) == ("undivided", "error")


def restored(state: int, held: int) -> list[Event]:
    """A stream that was given a state, over a data set that held something else."""
    began = {"restored": state, "restored_over": held, "restored_site": 1}
    return stream(COUNTING, began=began)


def test_ranks_that_continue_one_ranks_stream() -> None:
    (finding,) = examine(restored(7, 1), restored(7, 2))
    assert finding.rule == "restored-alike"
    assert finding.location is not None and finding.location.line == 10
    (finding,) = examine(restored(7, 1), restored(7, 1))
    assert finding.rule == "unsharded-stream", "it was not divided before either"
    (finding,) = examine(restored(7, 1), restored(8, 2))
    assert finding.rule == "unsharded-stream"
    (finding,) = examine(restored(0, 1), restored(0, 2))
    assert finding.rule == "unsharded-stream"
