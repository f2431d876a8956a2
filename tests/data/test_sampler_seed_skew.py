"""sampler-seed-skew: other seeds, and samples that several ranks really read."""

from __future__ import annotations

import random
from array import array

from ddpdoctor.checks.data.sampler_epoch_frozen import SamplerEpochFrozen
from ddpdoctor.checks.data.sampler_seed_skew import SamplerSeedSkew
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from msgspec import structs
from readers import found, loader, run_of

from ddpdoctor.analysis.replicas import state_loading
from ddpdoctor.events import EpochBegan, EpochEnded, Event, IndicesRead
from ddpdoctor.events.pack import pack_ascending
from ddpdoctor.report.findings import Finding

MINE, THEIRS = [3, 1, 7, 0, 9, 4], [1, 2, 6, 8, 5, 7]
REST = [2, 5, 6, 8, 10, 11]


def part(rank: int, indices: list[int], *, shuffle: bool = True, **began: object) -> list[Event]:
    return loader(0, [indices], length=12, distributed=True, replicas=2, sampler_rank=rank,
                  total_size=12, shuffle=shuffle, began=began, sampler_site=1)  # fmt: skip


def examine(first: list[Event], second: list[Event]) -> list[Finding]:
    return found(SamplerSeedSkew(), run_of(first, second))


def test_other_seeds() -> None:
    (finding,) = examine(
        part(0, MINE, seed=1, sampler_epoch=0), part(1, THEIRS, seed=2, sampler_epoch=0)
    )  # fmt: skip
    assert finding.rule == "different-seeds"


def test_set_epoch_on_one_rank_only() -> None:
    first, second = part(0, MINE, seed=0, sampler_epoch=3), part(1, THEIRS, seed=0, sampler_epoch=0)
    (finding,) = examine(first, second)
    frozen = SamplerEpochFrozen().finding(
        summary="", cause="", fix="", location=finding.location
    )  # fmt: skip
    assert SamplerSeedSkew().explains(finding, frozen)


def test_each_rank_sets_its_epoch_to_a_number_of_its_own() -> None:
    called = {"seed": 0, "epochs_set": 1}
    ranks = part(0, MINE, sampler_epoch=3, **called), part(1, THEIRS, sampler_epoch=0, **called)
    (finding,) = examine(*ranks)
    drift = ParameterDrift()
    resumed = drift.finding(
        rule=state_loading.LOAD_ON_SOME, summary="", cause="", fix="", subjects=("weight",)
    )
    assert drift.explains(resumed, finding)
    (other,) = examine(part(0, MINE, seed=1), part(1, THEIRS, seed=2))
    assert not drift.explains(resumed, other)


def of_three(**began: list[int]) -> Finding:
    """`began`: by rank."""
    shares = [0, 1, 2, 3], [3, 4, 5, 6], [8, 9, 10, 11]
    ranks = [
        loader(0, [own], length=12, distributed=True, replicas=3, sampler_rank=rank, shuffle=True,
               total_size=12, began={"seed": 0, **{k: v[rank] for k, v in began.items()}})
        for rank, own in enumerate(shares)
    ]  # fmt: skip
    (finding,) = found(SamplerSeedSkew(), run_of(*ranks))
    return finding


def test_the_ranks_that_are_not_as_the_others() -> None:
    assert of_three(seed=[0, 5, 0]).ranks == (1,)
    assert of_three(sampler_epoch=[2, 3, 2], epochs_set=[2, 2, 2]).ranks == (1,)
    only_rank_0 = of_three(sampler_epoch=[2, 0, 0], epochs_set=[2, 0, 0])
    assert only_rank_0.ranks == (1, 2), "which do not call `set_epoch`"


def test_a_look_at_the_first_batch_on_one_rank_shifts_nothing() -> None:
    rounds = {"seed": 0, "sampler_epoch": [0, 0, 1]}
    looked = loader(0, [MINE[:4], MINE, THEIRS], length=12, distributed=True, replicas=2,
                    sampler_rank=0, shuffle=True, began=rounds, total_size=12,
                    ends={"exhausted": [False, True, True]})  # fmt: skip
    others = {"seed": 0, "sampler_epoch": [0, 1]}
    plain = loader(0, [REST, [0, 3, 4, 9, 10, 11]], length=12, distributed=True, replicas=2,
                   sampler_rank=1, shuffle=True, began=others, total_size=12)  # fmt: skip
    assert not examine(looked, plain)


def shares(rank: int, indices: list[int], seed: int, **more: object) -> list[Event]:
    given = {"sampler": "Shares", "own_order": True, "content": 1, **more}
    return loader(0, [indices], length=80, began={"seed": seed}, **given)  # type: ignore[arg-type]


def test_a_sampler_of_ones_own() -> None:
    mine, yours = list(range(40)), list(range(20, 60))
    (finding,) = examine(shares(0, mine, 1), shares(1, yours, 2))
    assert finding.rule == "different-seeds"
    assert not examine(shares(0, mine, 1), shares(1, yours, 1))
    assert not examine(shares(0, mine, 1, shuffle=False), shares(1, yours, 2, shuffle=False))
    split = {"distributed": True, "replicas": 2, "total_size": 80}
    assert examine(shares(0, mine, 1, sampler_rank=0, **split),
                   shares(1, yours, 2, sampler_rank=1, **split))  # fmt: skip
    drawn = [*mine, 5, 6, 7]  # with replacement, a stream of its own on each rank
    assert not examine(shares(0, drawn, 1, sampler_rank=0, **split),
                       shares(1, yours, 2, sampler_rank=1, **split))  # fmt: skip


def small(rank: int, *, seed: int, within: int = 0) -> list[Event]:
    """A third of 90 samples, of an order of its own, in two epochs; some of them twice."""
    drawn = [random.Random(seed + epoch).sample(range(90), 30) for epoch in (0, 100)]
    epochs = [order[: 30 - within] + order[:within] for order in drawn]
    return loader(0, epochs, length=90, began={"seed": seed}, sampler="Shares", own_order=True,
                  content=1, batch_size=10)  # fmt: skip


def test_few_samples_in_orders_of_their_own() -> None:
    (finding,) = found(SamplerSeedSkew(), run_of(*(small(r, seed=10 + r) for r in range(3))))
    assert finding.rule == "different-seeds"
    drawn = (small(r, seed=10 + r, within=5) for r in range(3))  # with replacement
    assert not found(SamplerSeedSkew(), run_of(*drawn))


def test_seeds_that_agree() -> None:
    assert not examine(part(0, MINE, seed=1), part(1, REST, seed=1))


def test_seeds_that_differ_without_consequence() -> None:
    assert not examine(part(0, MINE, seed=1), part(1, REST, seed=2))


def test_no_shuffling() -> None:
    assert not examine(
        part(0, MINE, seed=1, shuffle=False), part(1, THEIRS, seed=2, shuffle=False)
    )  # fmt: skip


def endless(rank: int, seed: int, *, of: int | None = None, replaced: bool = False) -> list[Event]:
    """A sampler of the program's own that repeats the data in new orders; ranks take turns in it.
    The first pass is on record by itself."""
    draw = random.Random(seed)
    if replaced:
        every = [draw.randrange(40) for _ in range(160)]
    else:
        every = [i for _ in range(4) for i in draw.sample(range(40), 40)]
    mine = every[rank::2]
    values: list[Event] = loader(
        0, [mine], length=40, own_order=True, replacement=replaced, exhausted=False,
        began={"seed": seed if of is None else of},
    )  # fmt: skip
    begin = next(n for n, e in enumerate(values) if isinstance(e, EpochBegan))
    first = IndicesRead(at=0, loader=0, epoch=0, batches=5, samples=20, backwards=5,
                        indices=pack_ascending(array("q", mine[:20])))  # fmt: skip
    end = values[-1]
    assert isinstance(end, EpochEnded)
    rest = structs.replace(end, indices=pack_ascending(array("q", mine[20:])))
    return [*values[: begin + 1], first, *values[begin + 1 : -1], rest]


def test_samplers_without_an_end() -> None:
    (finding,) = examine(endless(0, 1), endless(1, 2))
    assert finding.rule == "different-seeds"
    assert "of the first 40 samples are read by" in finding.summary
    assert "broadcast" in finding.fix
    assert examine(endless(0, 1), endless(1, 1)) == []
    assert examine(endless(0, 1, of=5), endless(1, 1, of=6)) == [], "without consequence"
    assert examine(endless(0, 1, replaced=True), endless(1, 2, replaced=True)) == []
