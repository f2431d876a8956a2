"""sampler-padding-duplicates: which samples count twice, where, and what that can do."""

from __future__ import annotations

import math
from array import array

import msgspec
import pytest
from ddpdoctor.checks.data.sampler_padding_duplicates import SamplerPaddingDuplicates
from readers import found, loader, run_of

from ddpdoctor.events import (
    CallBlock,
    CallRun,
    CallSite,
    Event,
    GatheredWhole,
    ObjectsGathered,
    Place,
    Signature,
)
from ddpdoctor.events.pack import pack_ascending
from ddpdoctor.report.findings import Finding, Severity


def part(length: int, world: int, rank: int, **more: object) -> list[Event]:
    """What `DistributedSampler(shuffle=False)` hands out."""
    padded = list(range(length))
    total = -(-length // world) * world
    padded += (padded * world)[: total - length]
    return loader(
        0,
        [padded[rank:total:world]],
        length=length,
        distributed=True,
        replicas=world,
        sampler_rank=rank,
        total_size=total,
        **{"trains": False, "sampler_site": 1, **more},  # type: ignore[arg-type]
    )


SUMMED: list[Event] = [
    Signature(at=0, id=7, op="all_reduce", dtype="float32", shape=(2,), numel=2),
    CallBlock(at=0, id=7, codes=(7, 0)),
    CallRun(at=0, group=0, first=0, block=7, repeat=1, step=0, every=0),
]
"""Totals that are summed after an evaluation."""


def examine(length: int, world: int, *, summed: bool = True, **more: object) -> list[Finding]:
    ranks = [[*part(length, world, r, **more), *(SUMMED if summed else ())] for r in range(world)]
    return found(SamplerPaddingDuplicates(), run_of(*ranks))


def test_evaluation_that_counts_one_sample_twice() -> None:
    (finding,) = examine(21, 2)
    assert finding.severity is Severity.WARNING
    assert finding.evidence["for example"] == [{"index": 0, "times": 2, "ranks": [0, 1]}]
    assert finding.location is not None and finding.location.line == 10


@pytest.mark.parametrize(
    ("length", "world", "error"),
    [
        (21, 2, 1 * 20 / (21 * 22)),  # d (N - d) / (N (N + d))
        (10, 4, 2 * 8 / (10 * 12)),
        (3, 8, 2 * (3 / 8 - 1 / 3)),  # padded by more than the data: 3, 3 and 2 times
    ],
)
def test_the_largest_error_of_a_mean(length: int, world: int, error: float) -> None:
    (finding,) = examine(length, world)
    assert finding.evidence["largest error of an averaged metric"] == f"{error:.6f} of its range"
    # by brute force: the worst subset of samples that score 1
    counts = [sum(1 for r in range(world) for i in _read(length, world, r) if i == n)
              for n in range(length)]  # fmt: skip
    total = sum(counts)
    worst = sum(max(0.0, c / total - 1 / length) for c in counts)
    assert worst == pytest.approx(error)


def _read(length: int, world: int, rank: int) -> list[int]:
    from ddpdoctor.events import EpochEnded
    from ddpdoctor.events.pack import unpack_ascending

    (ended,) = [e for e in part(length, world, rank) if isinstance(e, EpochEnded)]
    return unpack_ascending(ended.indices)


def test_results_that_no_collective_puts_together() -> None:
    """They may go through files, and be cut there."""
    (finding,) = examine(21, 2, summed=False)
    assert (finding.rule, finding.severity) == ("padding-apart", Severity.NOTE)


def test_training_is_a_note() -> None:
    (finding,) = examine(21, 2, trains=True)
    assert finding.severity is Severity.NOTE


def test_no_padding() -> None:
    assert not examine(20, 2)


def test_drop_last() -> None:
    ranks = [
        loader(0, [list(range(r, 20, 2))], length=21, distributed=True, replicas=2,
               sampler_rank=r, total_size=20, sampler_drop_last=True, trains=False)
        for r in range(2)
    ]  # fmt: skip
    assert not found(SamplerPaddingDuplicates(), run_of(*ranks))


def test_an_epoch_that_never_came_to_the_padding() -> None:
    assert not examine(21, 2, ends={"exhausted": False})


def mine(rank: int, *, trains: bool) -> list[Event]:
    """A sampler of one's own: each sample twice on its rank, and sample 0 on both ranks."""
    indices = sorted([*range(rank, 20, 2)] * 2 + [0] * rank)
    return loader(
        0, [indices], length=20, distributed=True, replicas=2, sampler_rank=rank, total_size=41,
        sampler="Repeating", own_order=True, trains=trains,
    )  # fmt: skip


def test_what_a_sampler_of_ones_own_repeats_in_training() -> None:
    ranks = [mine(r, trains=True) for r in range(2)]
    assert not found(SamplerPaddingDuplicates(), run_of(*ranks))


def test_what_a_sampler_of_ones_own_gives_to_several_ranks() -> None:
    ranks = [[*mine(r, trains=False), *SUMMED] for r in range(2)]
    (finding,) = found(SamplerPaddingDuplicates(), run_of(*ranks))
    assert finding.rule == "custom-sampler"


def gathering(*more: Event, op: str = "all_gather", numel: int = -1, calls: int = 1) -> Finding:
    """An evaluation of 21 samples, 11 on each rank, and what is gathered after it."""
    events = [
        Signature(at=0, id=0, op=op, numel=numel),
        CallSite(at=0, id=5, places=(Place(site=4),)),
        CallBlock(at=0, id=0, codes=(0, 5) * calls),
        CallRun(at=0, group=0, first=0, block=0, step=0),
        *more,
    ]
    ranks = [[*part(21, 2, r), *events] for r in range(2)]
    (finding,) = found(SamplerPaddingDuplicates(), run_of(*ranks))
    return finding


def test_results_that_are_gathered_may_be_trimmed() -> None:
    finding = gathering(numel=11)
    assert finding.severity is Severity.NOTE
    assert "gathered here" in [r.label for r in finding.related]
    assert gathering(numel=4, calls=3).severity is Severity.NOTE, "batch by batch"


def test_sums_that_are_gathered_cannot_be_trimmed() -> None:
    assert gathering(numel=2).severity is Severity.WARNING
    assert gathering(numel=1, calls=6).severity is Severity.WARNING, "one of each batch"


def test_objects_that_are_gathered_tell_how_much_they_hold() -> None:
    few, many = (ObjectsGathered(at=0, call_site=5, entries=n) for n in (3, 15))
    assert gathering(few, op="all_gather_object").severity is Severity.WARNING
    assert gathering(few, many, op="gather_object").severity is Severity.NOTE
    assert gathering(op="all_gather_object").severity is Severity.NOTE, "not known"


WHOLE = GatheredWhole(at=0, call_site=5)


def scored(
    *more: Event, shape: tuple[int, ...] = (11,), calls: int = 1, length: int = 21
) -> list[Finding]:
    """An evaluation on two ranks, and the tensors that both gather at one line."""
    numel = math.prod(shape)
    events = [
        Signature(at=0, id=0, op="all_gather", numel=numel, shape=shape),
        CallSite(at=0, id=5, places=(Place(site=4),)),
        CallBlock(at=0, id=0, codes=(0, 5) * calls),
        CallRun(at=0, group=0, first=0, block=0, step=0),
        *more,
    ]
    ranks = [[*part(length, 2, r), *events] for r in range(2)]
    return found(SamplerPaddingDuplicates(), run_of(*ranks))


def test_repeated_results_that_are_scored() -> None:
    (finding,) = scored(WHOLE)
    assert (finding.rule, finding.severity) == ("padding-scored", Severity.WARNING)
    assert finding.location is not None and finding.location.line == 21
    assert finding.evidence["rows gathered"] == 22
    (both,) = scored(WHOLE, shape=(11, 3), calls=2)
    assert both.rule == "padding-scored", "predictions and labels"


def test_repeated_results_that_a_framework_gathers() -> None:
    (finding,) = scored(GatheredWhole(at=0, call_site=5, by="accelerate.accelerator"))
    assert finding.fix == "`accelerator.gather_for_metrics(...)`"


def test_rows_that_are_not_those_of_the_samples() -> None:
    assert [f.rule for f in scored()] == ["padding-gathered"], "some may be dropped"
    assert [f.rule for f in scored(WHOLE, shape=(10,))] == ["padded-evaluation"]
    assert [f.rule for f in scored(WHOLE, shape=(1,), calls=11)] != ["padding-scored"]
    assert not scored(WHOLE, shape=(10,), length=20), "none are repeated"


def test_rows_gathered_in_another_step() -> None:
    later = CallRun(at=0, group=0, first=1, block=0, step=7)
    (finding,) = scored(WHOLE, later)
    assert finding.rule == "padding-scored"
    other = part(8, 1, 0)
    other = [msgspec.structs.replace(e, loader=1) for e in other]
    assert [f.rule for f in scored(WHOLE, *other)] == ["padding-gathered"], "of which evaluation?"


def test_only_a_subset_of_a_large_data_set_is_on_record() -> None:
    """One index in two by hash: the number of duplicates is known all the same."""
    from ddpdoctor.events import EpochEnded

    scatter = 2654435761
    ranks = []
    for r in range(2):
        events = part(1001, 2, r)
        ended = events.pop()
        assert isinstance(ended, EpochEnded)
        kept = [i for i in _read(1001, 2, r) if (i * scatter & 0xFFFFFFFF) >> 31 == 0]
        events.append(
            msgspec.structs.replace(ended, indices=pack_ascending(array("q", kept)), sampled=2)
        )
        ranks.append(events)
    (finding,) = found(SamplerPaddingDuplicates(), run_of(*ranks))
    assert "1 index in 2 compared" in str(finding.evidence["samples read"])
