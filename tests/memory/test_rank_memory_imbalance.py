"""DDP205 over literal events."""

from __future__ import annotations

from ddpdoctor.checks.memory.rank_memory_imbalance import RankMemoryImbalance
from recordings import START, make_run

from ddpdoctor.events import Event, MemorySample, Tensor, Wrapped
from ddpdoctor.report.findings import Finding

MB = 1 << 20


def rank(levels: list[int], device: int = 0) -> list[Event]:
    return [
        MemorySample(
            at=START + n, step=n, rss_bytes=level * MB, peak_rss_bytes=max(levels) * MB,
            device_peak_bytes=device * MB,
        )
        for n, level in enumerate(levels)
    ]  # fmt: skip


def found(*ranks: list[Event]) -> list[Finding]:
    return list(RankMemoryImbalance().examine(make_run(dict(enumerate(ranks)))))


def test_host_memory_of_one_rank() -> None:
    (finding,) = found(rank([300, 900, 900, 900, 900, 900]), rank([300] * 6), rank([310] * 6))
    assert finding.ranks == (0,)


def test_device_memory_of_one_rank() -> None:
    (finding,) = found(rank([300] * 6, 4000), rank([300] * 6, 9000))
    assert finding.ranks == (1,)
    assert finding.evidence["where"] == "device"


def test_several_ranks_are_named_together() -> None:
    (finding,) = found(*(rank([300 if n < 3 else 900] * 6) for n in range(5)))
    assert finding.ranks == (3, 4)


def test_rank_0_a_little_higher() -> None:
    assert not found(rank([380] * 6, 2200), rank([300] * 6, 2000))


def test_a_short_peak() -> None:
    assert not found(rank([300, 300, 300, 300, 900, 300, 300]), rank([300] * 7))


def test_parts_of_a_model() -> None:
    def part(size: int) -> Event:
        weight = Tensor(name="w", shape=(size,), dtype="float32")
        return Wrapped(
            at=START, model=0, wrapper="DistributedDataParallel", kind="Part", group=0, site=-1,
            parameters=(weight,),
        )  # fmt: skip

    assert not found([*rank([900] * 6), part(9)], [*rank([300] * 6), part(1)])


def test_a_single_rank() -> None:
    assert RankMemoryImbalance().unobserved(make_run({0: rank([300] * 6)}))
