"""data-overlap: samples that a data set picks at random, alike on all ranks, whatever the index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest
from ddpdoctor.checks.data.data_overlap import DataOverlap
from ddpdoctor.checks.data.identical_augmentation import IdenticalAugmentation
from ddpdoctor.checks.data.sampler_missing import SamplerMissing
from readers import fingerprints, loader, run_of

from ddpdoctor.events import Event, ForwardInput
from ddpdoctor.events.pack import pack
from ddpdoctor.probe.watchers.data.dataset_entries import holds_entries, ignores_index
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Finding, Severity

torch = pytest.importorskip("torch")
data = torch.utils.data


def crops(
    rank: int,
    rows: Sequence[int] = range(1, 21),
    *,
    state: int = 5,
    drawn: tuple[str, ...] = ("numpy",),
    share: bool = True,
    indexless: bool = True,
    holds: bool = True,
) -> list[Event]:
    """`rows`: digests of the samples, in order of delivery."""
    indices = list(range(rank, 40, 2)) if share else list(range(20))
    sampler = {"distributed": True, "replicas": 2, "sampler_rank": rank} if share else {}
    events = loader(
        0, [indices], length=40 if share else 20, total_size=40 if share else -1,
        began={"random": (1 + rank, state, 3 + rank)}, ends={"drawn": drawn},
        indexless=indexless, holds=holds, **sampler,
    )  # fmt: skip
    read = fingerprints(0, 0, indices, 1)
    return [*events, msgspec.structs.replace(read, columns=(pack(rows),))] if rows else events


def told(first: list[Event], second: list[Event]) -> list[Finding]:
    checks = [DataOverlap(), IdenticalAugmentation(), SamplerMissing()]
    return list(diagnose(run_of(first, second), checks).findings)


@pytest.mark.parametrize("share", [True, False])
def test_samples_picked_alike_whatever_the_index(share: bool) -> None:
    (finding,) = told(crops(0, share=share), crops(1, share=share))
    assert (finding.check, finding.severity) == ("data-overlap", Severity.ERROR)
    assert [c.check for c in finding.consequences] == ["identical-augmentation"]


def test_samples_picked_by_generators_of_the_ranks_own() -> None:
    ranks = [crops(r, range(1 + 50 * r, 21 + 50 * r), drawn=(), share=False) for r in (0, 1)]
    assert not told(*ranks), "each reads as many as it should, and no sampler changes which"


def test_samples_picked_by_a_generator_of_the_data_set_with_one_seed() -> None:
    (finding,) = told(crops(0, drawn=()), crops(1, drawn=()))
    assert finding.rule == "equal-random-generators"


def test_random_numbers_made_on_the_spot_are_a_note() -> None:
    found = {f.check: f.severity for f in told(crops(0, holds=False), crops(1, holds=False))}
    assert found["data-overlap"] is Severity.NOTE


@pytest.mark.parametrize("other", [
    {"rows": [*range(1, 20), 99]},
    {"state": 6},  # a data set that holds its samples twice, in order
])  # fmt: skip
def test_equal_places_without_a_common_stream(other: dict[str, object]) -> None:
    found = told(crops(0, indexless=False), crops(1, indexless=False, **other))  # type: ignore[arg-type]
    assert "data-overlap" not in {f.check for f in found}


def test_samples_that_are_all_alike_are_no_common_stream() -> None:
    alike = [7] * 20
    assert "data-overlap" not in {f.check for f in told(crops(0, alike), crops(1, alike))}


@pytest.mark.parametrize(("shift", "fires"), [(0, True), (1, False)])
def test_batches_that_the_model_is_given_tell_it_too(shift: int, fires: bool) -> None:
    """Of long data sets only some samples are looked at, others on each rank."""
    ranks = [
        [
            *crops(rank, ()),
            *(
                ForwardInput(at=0, model=0, forward=n, site=4, digest=50 + n + rank * shift,
                             numbers=40, rows=4, fed=True)
                for n in range(8)
            ),
        ]
        for rank in (0, 1)
    ]  # fmt: skip
    assert ("data-overlap" in {f.check for f in told(*ranks)}) is fires


class Crops(data.Dataset[int]):
    def __init__(self, values: object) -> None:
        self.values, self.shape = values, (3, 8, 8)

    def __getitem__(self, _: int) -> int:
        return id(self.values)


class Plain(Crops):
    def __getitem__(self, n: int) -> int:
        return n


class Captured(Crops):
    def __getitem__(self, n: int) -> int:
        return (lambda: n)()


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_data_set_that_never_looks_at_its_index() -> None:
    long = Crops(list(range(20)))
    assert ignores_index(long)
    assert ignores_index(data.Subset(data.Subset(long, [1, 2]), [0]))
    assert not any(map(ignores_index, (Plain(()), Captured(()), Stream(), [1, 2])))


def test_a_data_set_that_holds_what_samples_are_taken_from() -> None:
    assert holds_entries(Crops(list(range(20))))
    assert holds_entries(data.Subset(Crops(torch.zeros(4)), [0]))
    assert not holds_entries(Crops(20))
