"""identical-augmentation: generators that stand alike, and are drawn from."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.data.identical_augmentation import IdenticalAugmentation
from readers import found, loader, run_of

from ddpdoctor.events import ContentRead, Event, StepDraws, WorkerRandom
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Finding, Severity


def part(rank: int, state: int, drawn: tuple[str, ...], **more: object) -> list[Event]:
    began = {"random": (state, 8, 9), **more}
    return loader(0, [list(range(rank, 40, 2))], distributed=True, replicas=2, sampler_rank=rank,
                  began=began, ends={"drawn": drawn}, total_size=40)  # fmt: skip


def examine(first: list[Event], second: list[Event]) -> list[Finding]:
    return found(IdenticalAugmentation(), run_of(first, second))


def test_generators_that_stand_alike_and_are_drawn_from() -> None:
    (finding,) = examine(part(0, 5, ("torch",)), part(1, 5, ("torch",)))
    assert finding.severity is Severity.NOTE


def test_nothing_random_happens() -> None:
    assert not examine(part(0, 5, ()), part(1, 5, ()))


def test_generators_of_their_own() -> None:
    assert not examine(part(0, 5, ("torch",)), part(1, 6, ("torch",)))


@pytest.mark.parametrize(("later", "told"), [((6, 6), True), ((6, 7), False)])
def test_ranks_that_draw_equally_many_numbers_or_not(later: tuple[int, int], told: bool) -> None:
    def epochs(rank: int) -> list[Event]:
        share = list(range(rank, 40, 2))
        began = {"random": [(5, 8, 9), (later[rank], 8, 9)]}
        return loader(0, [share, share], distributed=True, replicas=2, sampler_rank=rank,
                      began=began, ends={"drawn": ("torch",)}, total_size=40)  # fmt: skip

    assert bool(examine(epochs(0), epochs(1))) is told


@pytest.mark.parametrize(("before", "told"), [((6, 6), True), ((6, 7), False)])
def test_ranks_that_part_within_an_epoch(before: tuple[int, int], told: bool) -> None:
    ranks = (
        [*part(rank, 5, ("torch",)),
         StepDraws(at=0, model=0, step=2, before=before[rank], after=0, dropout=True, site=-1)]
        for rank in range(2)
    )  # fmt: skip
    assert bool(examine(*ranks)) is told


def test_another_generator_is_drawn_from() -> None:
    (finding,) = examine(part(0, 5, ("random",)), part(1, 6, ("random",)))
    assert finding.rule == "equal-rank-generators"


def workers(
    rank: int, *, seed: int, moves: bool, noted: tuple[WorkerRandom, ...] = ()
) -> list[Event]:
    indices = list(range(rank, 40, 2))
    events = loader(0, [indices, indices], distributed=True, replicas=2, sampler_rank=rank,
                    workers=2, began={"base_seed": seed}, ends={"workers": noted},
                    total_size=40)  # fmt: skip
    for epoch in range(2):
        digests = pack(1000 * epoch * moves + i + 1 for i in indices)
        events.append(
            ContentRead(at=0, loader=0, epoch=epoch, batches=pack([0] * len(indices)),
                        columns=(digests,), indices=pack(indices))
        )  # fmt: skip
    return events


def test_workers_with_one_base_seed_whose_samples_change() -> None:
    (finding,) = examine(workers(0, seed=1, moves=True), workers(1, seed=1, moves=True))
    assert finding.rule == "equal-worker-generators"


def test_workers_that_draw_nothing() -> None:
    assert not examine(workers(0, seed=1, moves=False), workers(1, seed=1, moves=False))


def test_workers_with_seeds_of_their_own() -> None:
    assert not examine(workers(0, seed=1, moves=True), workers(1, seed=2, moves=True))


def forked(seed: int, state: int, *drawn: str) -> tuple[WorkerRandom, ...]:
    """Workers with base seeds of their own, whose numpy stands at one state."""
    return tuple(WorkerRandom(n, (seed + n, state + n, seed - n), drawn) for n in range(2))


def test_workers_that_seed_themselves_without_the_rank() -> None:
    ranks = [workers(r, seed=50 + r, moves=True, noted=forked(50 + r, 7, "numpy")) for r in (0, 1)]
    (finding,) = examine(*ranks)
    assert finding.rule == "equal-worker-seeds"


def test_workers_that_seed_themselves_with_the_rank() -> None:
    ranks = [workers(r, seed=1, moves=True, noted=forked(1, 7 + 5 * r, "numpy")) for r in (0, 1)]
    assert not examine(*ranks), "though the base seed is one, and loading draws"


def test_workers_that_stand_alike_and_draw_nothing() -> None:
    ranks = [workers(r, seed=50 + r, moves=False, noted=forked(50 + r, 7, "torch")) for r in (0, 1)]
    assert not examine(*ranks)


def test_workers_that_inherit_one_seed() -> None:
    ranks = [workers(r, seed=1, moves=True, noted=forked(1, 7, "numpy")) for r in (0, 1)]
    (finding,) = examine(*ranks)
    assert finding.rule == "equal-worker-generators"


def kept(rank: int, state: int, *, in_workers: bool) -> list[Event]:
    """A data set whose own generator stands at a state; the global ones differ."""
    own = {"Photos.rng": state}
    if in_workers:
        noted = tuple(WorkerRandom(n, (50 + rank + n, 5, 6), kept=own) for n in range(2))
        return workers(rank, seed=50 + rank, moves=True, noted=noted)
    indices = [list(range(rank, 40, 2))]
    return loader(0, indices, distributed=True, replicas=2, sampler_rank=rank,
                  began={"random": (rank, 8, 9)}, ends={"kept": own}, total_size=40)  # fmt: skip


@pytest.mark.parametrize("in_workers", [False, True])
def test_a_generator_that_the_data_set_keeps(in_workers: bool) -> None:
    (finding,) = examine(*(kept(rank, 7, in_workers=in_workers) for rank in (0, 1)))
    assert finding.rule == "equal-own-generators"
    assert not examine(*(kept(rank, 7 + rank, in_workers=in_workers) for rank in (0, 1)))
