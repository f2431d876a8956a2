"""loader-shuffle-lost: training in the data set's own order."""

from __future__ import annotations

from ddpdoctor.checks.data.loader_shuffle_lost import LoaderShuffleLost
from readers import fingerprints, found, loader, run_of

from ddpdoctor.events import Payload
from ddpdoctor.report.findings import Finding, Severity


def examine(count: int = 100, *, shuffle: bool | None = False, **more: object) -> list[Finding]:
    ranks = [
        loader(0, [list(range(r, count, 2))], distributed=True, replicas=2, sampler_rank=r,
               shuffle=shuffle, total_size=count, sampler_site=1, **more)  # type: ignore[arg-type]
        for r in range(2)
    ]  # fmt: skip
    return found(LoaderShuffleLost(), run_of(*ranks))


def test_training_without_shuffling() -> None:
    (finding,) = examine()
    assert finding.severity is Severity.NOTE
    assert finding.location is not None and finding.location.line == 10


def test_evaluation() -> None:
    assert not examine(trains=False)


def split(epochs: int, *contents: int) -> list[Finding]:
    """Data that `random_split` has mixed; `contents`: of each epoch."""
    mixed = Payload(name="indices", kind="indices", length=100, order=1, ascending=False)
    ranks = []
    for r in range(2):
        indices = list(range(r, 100, 2))
        events = loader(
            0, [indices] * epochs, distributed=True, replicas=2, sampler_rank=r, shuffle=False,
            total_size=100, sampler_site=1, payloads=(mixed,),
        )  # fmt: skip
        ranks.append(events + [fingerprints(0, n, indices, c) for n, c in enumerate(contents)])
    return found(LoaderShuffleLost(), run_of(*ranks))


def test_a_split_mixed_the_data_before_once() -> None:
    assert not split(1, 1)
    (finding,) = split(3, 1, 1)
    assert finding.rule == "fixed-order"


def test_a_split_that_is_mixed_anew_for_every_epoch() -> None:
    assert not split(3, 1, 2)
    assert not split(3), "not known"


def test_a_handful_of_samples() -> None:
    assert not examine(8)


def test_a_sampler_that_shuffles() -> None:
    assert not examine(shuffle=True)
