"""sampler-drops-tail: what nobody ever sees."""

from __future__ import annotations

from ddpdoctor.checks.data.sampler_drops_tail import SamplerDropsTail
from readers import found, loader, run_of

from ddpdoctor.events import Event
from ddpdoctor.findings import Finding


def part(
    rank: int, count: int, *, length: int = 43, shuffled: bool = False, **more: object
) -> list[Event]:
    indices = list(range(rank, count, 2))
    return loader(
        0,
        [indices[::-1] if shuffled else indices],
        length=length,
        distributed=True,
        replicas=2,
        sampler_rank=rank,
        total_size=count,
        **{"sampler_drop_last": True, "sampler_site": 1, **more},  # type: ignore[arg-type]
    )


def examine(count: int, **more: object) -> list[Finding]:
    return found(SamplerDropsTail(), run_of(part(0, count, **more), part(1, count, **more)))  # type: ignore[arg-type]


def test_evaluation_that_leaves_one_out() -> None:
    (finding,) = examine(42, trains=False)
    assert finding.summary.startswith("1 of Photos (43)")
    assert finding.evidence["never seen, for example"] == "42"


def test_training_in_order_leaves_out_the_same_every_time() -> None:
    assert examine(42)


def test_shuffled_training_with_a_small_tail() -> None:
    assert not examine(42, shuffled=True)


def test_shuffled_training_that_leaves_out_much() -> None:
    assert examine(30, shuffled=True)


def test_nothing_left_out() -> None:
    assert not examine(44, length=44)


def test_an_epoch_that_was_left_early() -> None:
    assert not examine(42, ends={"exhausted": False})


def test_unread_samples_without_drop_last() -> None:
    assert not examine(42, sampler_drop_last=False)
