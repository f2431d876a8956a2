"""data-overlap: parts of one data set that each rank selects for itself."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence

import msgspec
import pytest
from ddpdoctor.checks.data.data_overlap import DataOverlap
from ddpdoctor.checks.data.dataset_mismatch import DatasetMismatch
from readers import found, loader, prologue, run_of
from recordings import make_run

from ddpdoctor.analysis.data.audit_table import audit_table
from ddpdoctor.events import ContentRead, EpochEnded, Event, GroupReady, Layer, Payload
from ddpdoctor.events.pack import pack, pack_ascending
from ddpdoctor.run import Run

ORDER = random.Random(3).sample(range(400), 400)
BENEATH = Payload(name="dataset.tensors[0]", kind="tensor", length=400, order=9, content=9)


def part(
    places: Sequence[int],
    *,
    beneath: Payload | None = BENEATH,
    regular: bool = False,
    **more: object,
) -> list[Event]:
    digest = zlib.crc32(array("q", places))
    indices = Payload(name="indices", kind="indices", length=len(places), order=digest)
    first = places[0], places[1] - places[0], len(places)
    layer = Layer(data=0, regular=first) if regular else Layer(data=0, indices=pack(places))
    return loader(
        0, [list(range(len(places)))], length=len(places), dataset="Subset",
        layers=(layer, Layer(data=1, length=400)),
        payloads=(indices, *([beneath] if beneath else [])), **more,
    )  # type: ignore[arg-type]  # fmt: skip


def samples(places: Sequence[int]) -> ContentRead:
    return ContentRead(
        at=0, loader=0, epoch=0, batches=pack(n // 4 for n in range(len(places))),
        columns=(pack(place + 1 for place in places),), indices=pack(range(len(places))),
    )  # fmt: skip


def both(first: Sequence[int], second: Sequence[int], **more: object) -> Run:
    return run_of(part(first, **more), part(second, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (range(200), range(100, 300), 100),
        (range(0, 400, 2), range(2, 400, 2), 199),
        (range(400), range(1, 400), 399),
        (ORDER[:200], ORDER[120:320], 80),
        (sorted(ORDER[:380]), ORDER[:380], 380),
    ],
)
def test_parts_that_overlap(first: Sequence[int], second: Sequence[int], shared: int) -> None:
    run = both(first, second)
    (finding,) = found(DataOverlap(), run)
    assert finding.rule == "overlapping-selections"
    ((row,),) = (table.rows for table in DataOverlap().tables(run))
    assert row[3:6] == ("400", str(len({*first} ^ {*second})), str(shared))


def test_long_parts_at_equal_distances() -> None:
    (finding,) = found(DataOverlap(), both(range(200), range(100, 300), regular=True))
    assert finding.rule == "overlapping-selections"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (range(0, 400, 2), range(1, 400, 2)),
        # neighbours with a little of each other, and samples that all ranks have beside their own
        (range(220), range(180, 400)),
        ([*range(100), *range(100, 200)], [*range(100), *range(200, 300)]),
        ([*range(0, 200, 2), *range(300, 400)], [*range(1, 200, 2), *range(300, 400)]),
        # draws of each rank's own, with and without replacement
        (random.Random(0).choices(range(400), k=400), random.Random(1).choices(range(400), k=400)),
        (random.Random(0).sample(range(400), 300), random.Random(1).sample(range(400), 300)),
        # all but another fifth on each rank
        (range(80, 400), [*range(80), *range(160, 400)]),
    ],
)
def test_parts_that_are_meant(first: Sequence[int], second: Sequence[int]) -> None:
    assert not found(DataOverlap(), both(first, second))


def test_ranks_that_train_models_of_their_own_or_evaluate() -> None:
    assert not found(DataOverlap(), both(range(200), range(100, 300), trains=False))
    assert not found(DataOverlap(), both(range(200), range(100, 300), replacement=True))
    alone = {
        r: [*prologue(2, wrapped=False), *part(p, ends={"collectives": 0})]
        for r, p in enumerate((range(200), range(100, 300)))
    }
    assert not found(DataOverlap(), make_run(alone))


def test_what_they_select_from_is_known_to_be_one_data_set() -> None:
    parts = range(200), range(100, 300)
    assert not found(DataOverlap(), both(*parts, beneath=None))
    known = [[*part(p, beneath=None), samples(p)] for p in parts]
    assert found(DataOverlap(), run_of(*known))
    others = [
        part(p, beneath=Payload(name="dataset.x", kind="tensor", length=400, order=r))
        for r, p in enumerate(parts)
    ]
    assert not found(DataOverlap(), run_of(*others))
    assert not found(DataOverlap(), both(*parts, content=1)), "other samples at the same places"


def test_a_group_that_shares_its_part() -> None:
    pair = GroupReady(at=0, group=1, name="1", backend="gloo", ranks=(0, 1), member=True, site=-1)
    same = [range(100), range(10, 100), range(100, 200), range(200, 300)]
    assert found(DataOverlap(), run_of(*map(part, same)))
    shared = [[*([pair] if r < 2 else []), *part(p)] for r, p in enumerate(same)]
    assert not found(DataOverlap(), run_of(*shared))


def held(places: Sequence[int], content: int = 0, **more: object) -> list[Event]:
    """Each rank holds these samples of one data set, in a list of its own."""
    length = len(places)
    events = loader(0, [list(range(length))], length=length, **more)  # type: ignore[arg-type]
    return [*events, samples([1000 * content + place for place in places])]


def test_lists_of_each_rank_that_overlap() -> None:
    (finding,) = found(DataOverlap(), run_of(held(range(60)), held(range(30, 90))))
    windows = [held(range(n, n + 40)) for n in (60, 40, 20)]
    (finding,) = found(DataOverlap(), run_of(*windows, held(range(200, 240))))
    assert finding.ranks == (0, 1, 2)
    (finding,) = found(
        DataOverlap(),
        run_of(*(held(range(n, n + 40)) for n in (0, 200, 20, 220))),
    )
    (finding,) = found(DataOverlap(), run_of(held(range(80)), held(range(1, 80))))
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (range(60), range(60, 120)),
        (range(60), range(50, 110)),
        ([*range(30), *range(100, 130)], [*range(30), *range(200, 230)]),
        ([*range(100, 130), *range(30)], [*range(200, 240), *range(30)]),
        (ORDER[:60], random.Random(5).sample(ORDER[:60], 60)),
        ([n % 5 for n in range(60)], [n % 5 for n in range(2, 62)]),
    ],
)
def test_lists_that_are_meant(first: Sequence[int], second: Sequence[int]) -> None:
    assert not found(DataOverlap(), run_of(held(first), held(second)))
    windows = held(range(60)), held(range(30, 90))
    other = held(range(30, 90), content=1)
    assert not found(DataOverlap(), run_of(windows[0], other)), "other samples"
    evaluated = [held(range(n, n + 60), trains=False) for n in (0, 30)]
    assert not found(DataOverlap(), run_of(*evaluated))


def test_ranks_that_begin_elsewhere_in_the_same_and_stop_in_time() -> None:
    rolled = [[*ORDER[n:], *ORDER[:n]] for n in (0, 200)]
    everything, share = (
        [
            [e if not isinstance(e, EpochEnded) else msgspec.structs.replace(
                e, exhausted=count == 400, samples=count,
                indices=pack_ascending(array("q", range(count))),
            ) for e in part(r)]
            for r in rolled
        ]
        for count in (400, 200)
    )  # fmt: skip
    assert found(DataOverlap(), run_of(*everything))
    assert not found(DataOverlap(), run_of(*share))


SHARES = [ORDER[:300], ORDER[100:], ORDER[:100] + ORDER[200:]]
"""Each leaves out 100 that are in the others."""


def held_out(places: Sequence[int], data: int = 1) -> list[Event]:
    layers = (Layer(data=7, indices=pack(places)), Layer(data=data, length=400))
    return loader(1, [list(range(len(places)))], length=len(places), dataset="Subset",
                  layers=layers, trains=False, site=1, loop_site=4)  # fmt: skip


def rest(places: Sequence[int]) -> list[int]:
    return sorted(set(range(400)) - set(places))


def test_splits_that_each_rank_makes_for_itself() -> None:
    run = run_of(*([*part(s), *held_out(rest(s))] for s in SHARES))
    (finding,) = found(DatasetMismatch(), run)
    assert finding.rule == "leaking-split"
    assert not found(DataOverlap(), run)
    (table,) = audit_table(run)
    assert table.rows[0][3] == "400"


@pytest.mark.parametrize("held", [
    [],
    ORDER[360:],  # one test for all, of what none trains on
    ORDER[110:180],  # of what all train on
])  # fmt: skip
def test_random_parts_without_a_test_on_what_others_train_on(held: list[int]) -> None:
    shares = [ORDER[:300], ORDER[100:360], ORDER[50:340]]
    kept = held_out(held) if held else []
    assert not found(DatasetMismatch(), run_of(*([*part(s), *kept] for s in shares)))


def test_shards_that_each_rank_splits() -> None:
    shards = [ORDER[:200], ORDER[200:]]
    assert not found(
        DatasetMismatch(), run_of(*([*part(s[:150]), *held_out(s[150:])] for s in shards))
    )


def test_a_test_on_another_data_set() -> None:
    run = run_of(*([*part(s), *held_out(rest(s), data=5)] for s in SHARES))
    assert not found(DatasetMismatch(), run)


@pytest.mark.parametrize(("shares", "twice"), [
    ([range(0, 400, 2), range(1, 400, 2)], True),
    ([ORDER[:200], ORDER[200:]], True),
    ([ORDER[:200], ORDER[100:300]], False),
    ([ORDER[:20], ORDER[20:40]], False),  # a small sample that each rank draws for itself
])  # fmt: skip
def test_shares_that_are_divided_once_more(shares: list[Sequence[int]], twice: bool) -> None:
    ranks = [
        part(s, distributed=True, replicas=2, sampler_rank=r, sampler_length=len(s) // 2)
        for r, s in enumerate(shares)
    ]
    (finding,) = found(DatasetMismatch(), run_of(*ranks))
    assert finding.rule == ("sharded-twice" if twice else "random-split")
