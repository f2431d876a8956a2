"""Loaders that are made anew for every epoch, and that later become other ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from ddpdoctor.checks.data.data_overlap import DataOverlap
from ddpdoctor.checks.data.dataset_mismatch import DatasetMismatch
from ddpdoctor.checks.data.sampler_missing import SamplerMissing
from ddpdoctor.checks.data.sampler_rank_mismatch import SamplerRankMismatch
from ddpdoctor.checks.data.sampler_seed_skew import SamplerSeedSkew
from readers import loader, run_of

from ddpdoctor.events import EpochBegan, Event, Payload
from ddpdoctor.report.findings import Finding, Severity

CHECKS = (
    SamplerMissing(),
    SamplerRankMismatch(),
    SamplerSeedSkew(),
    DataOverlap(),
    DatasetMismatch(),
)


def share(place: int, of: int = 2, length: int = 100) -> list[int]:
    return list(range(place, length, of))


def made(*epochs: Sequence[Event]) -> list[Event]:
    """A loader for each epoch, one after the other."""
    return [
        msgspec.structs.replace(
            event,
            at=10.0 * number + n / 100,
            **({"step": 10 * number - 10} if isinstance(event, EpochBegan) else {}),
        )
        for number, events in enumerate(epochs, 1)
        for n, event in enumerate(events)
    ]


def divided(number: int, place: int, of: int = 2, **more: object) -> list[Event]:
    fields = {"sampler": "DistributedSampler", "distributed": True, "shuffle": True, "seed": 0,
              "replicas": of, "sampler_rank": place, "content": 1} | more  # fmt: skip
    return loader(number, [share(place, of)], **fields)  # type: ignore[arg-type]


def found(*ranks: list[Event]) -> list[Finding]:
    run = run_of(*ranks)
    return [f for check in CHECKS for f in check.examine(run)]


def test_the_same_rank_on_all_from_the_third_epoch_on() -> None:
    ranks = [made(*(divided(n, r if n < 2 else 0, 3) for n in range(4))) for r in range(3)]
    (finding,) = found(*ranks)
    assert finding.check == "sampler-rank-mismatch"
    assert finding.ranks == (1, 2)
    assert finding.evidence["epoch"] == 2


def test_no_sampler_from_the_third_epoch_on() -> None:
    plain = {"sampler": "RandomSampler", "content": 1}
    ranks = [
        made(
            *(divided(n, r) for n in range(2)),
            *(loader(n, [list(range(100))], **plain) for n in (2, 3)),  # type: ignore[arg-type]
        )
        for r in range(2)
    ]
    (finding,) = found(*ranks)
    assert finding.check == "sampler-missing"
    assert finding.severity is Severity.ERROR


def test_another_split_on_one_rank_from_the_third_epoch_on() -> None:
    def split(order: int) -> tuple[Payload, ...]:
        return (Payload("indices", "indices", 100, order, 7),)

    ranks = [
        made(
            *(
                divided(n, r, 3, payloads=split(5 if n > 1 and r == 2 else 4), content=None)
                for n in range(4)
            )
        )
        for r in range(3)
    ]
    (finding,) = found(*ranks)
    assert finding.check == "dataset-mismatch"
    assert finding.ranks == (2,)


def test_ranks_that_take_turns_in_their_shares() -> None:
    assert found(*(made(*(divided(n, (r + n) % 3, 3) for n in range(6))) for r in range(3))) == []


def test_a_data_set_that_only_one_rank_reads_at_that_line() -> None:
    other = {"dataset": "Extra", "length": 30, "trains": False, "sampler": "SequentialSampler"}
    ranks = [made(*(divided(n, r) for n in range(3))) for r in range(2)]
    extra = loader(7, [list(range(30))], **other)  # type: ignore[arg-type]
    ranks[0] += [msgspec.structs.replace(e, at=25 + n / 100) for n, e in enumerate(extra)]
    assert found(*ranks) == []
