"""DDP104 over literal events."""

from __future__ import annotations

import msgspec
import pytest
from ddpdoctor.checks.launch.cpu_oversubscribed import CpuOversubscribed
from recordings import PID, START, make_run, monitor, site, started, steps

from ddpdoctor.events import Event, LoaderSeen, RankSample, ThreadsSeen
from ddpdoctor.report.findings import Finding, FixKind
from ddpdoctor.run import Run


def rank(
    number: int, threads: int, *, asked: bool = True, cpus: range = range(8), device: str = "cpu",
    workers: int = 0,
) -> list[Event]:  # fmt: skip
    seen = ThreadsSeen(
        at=START + 1, compute=threads, alive=threads, asked=asked, device=device, cpus=tuple(cpus)
    )
    loader = LoaderSeen(
        at=0, loader=0, site=-1, loop_site=-1, dataset="D", length=9, sampler="S", workers=workers
    )
    return [started(number, 4), seen, loader, *steps(2), *late(steps(1, first=2))]


def late(events: list[Event]) -> list[Event]:
    return [msgspec.structs.replace(e, at=START + 20) for e in events]


def node(runnable: float | None, children: int = 0, quota: float | None = None) -> list[Event]:
    samples = [
        RankSample(
            at=START + 2 + n, rank=r, pid=PID + r, rss_bytes=1, children=children, runnable=runnable
        )
        for n in range(5)
        for r in range(4)
    ]
    return [monitor(cpu_quota=quota), *samples]


def found(run: Run) -> list[Finding]:
    return list(CpuOversubscribed().examine(run))


def run_of(threads: int, seen: list[Event], **fields: object) -> Run:
    return make_run({r: rank(r, threads, **fields) for r in range(4)}, nodes={0: seen})  # type: ignore[arg-type]


def test_threads_that_were_asked_for() -> None:
    (finding,) = found(run_of(8, node(1.0)))
    assert finding.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("given", ["1", "16", ""])
def test_the_line_that_sets_them_is_what_to_change(given: str) -> None:
    def own(number: int) -> list[Event]:
        _, seen, *rest = rank(number, 8)
        assert isinstance(seen, ThreadsSeen)
        environment = {"OMP_NUM_THREADS": given} if given else {}
        line = site(1, "train.py", 25, "torch.set_num_threads(8)")
        seen = msgspec.structs.replace(seen, site=1, set_there=True)
        return [started(number, 4, environment=environment), line, seen, *rest]

    (finding,) = found(make_run({r: own(r) for r in range(4)}, nodes={0: node(1.0)}))
    assert finding.rule == "too-many-threads"
    assert finding.location is not None and finding.location.line == 25


def test_quota_of_the_container_counts() -> None:
    assert not found(run_of(4, node(1.0)))
    (finding,) = found(run_of(4, node(1.0, quota=2.0)))
    assert finding.evidence["cores allowed"] == 2.0


def test_one_thread_per_rank() -> None:
    assert not found(run_of(1, node(1.0)))


def test_default_threads_that_are_idle() -> None:
    assert not found(run_of(8, node(1.0), asked=False))
    assert not found(run_of(8, node(None), asked=False))


def test_default_threads_that_crowd() -> None:
    assert found(run_of(8, node(6.0), asked=False))


def test_ranks_with_cores_of_their_own() -> None:
    run = make_run(
        {r: rank(r, 8, cpus=range(8 * r, 8 * r + 8)) for r in range(4)}, nodes={0: node(8.0)}
    )
    assert not found(run)


def test_training_on_gpus() -> None:
    assert not found(run_of(32, node(1.0), device="cuda"))


def test_workers_that_crowd() -> None:
    (finding,) = found(run_of(1, node(6.0, children=8), workers=8))
    assert finding.rule == "too-many-workers"


def test_threads_that_are_as_few_as_they_should_be_are_not_what_to_change() -> None:
    (crowded,) = found(run_of(1, node(6.0, children=8), workers=8))
    (narrow,) = found(run_of(1, node(1.5, children=1, quota=2.0), workers=1))
    assert (crowded.fix_kind, narrow.fix_kind) == (FixKind.SAFE, FixKind.CHECK), "other batches"
    (alone,) = found(run_of(1, node(1.0, quota=1.0), asked=False))
    (both,) = found(run_of(3, node(6.0, children=8), workers=8))
    assert (alone.rule, both.rule) == ("too-many-ranks", "too-many-workers")


def test_workers_that_mostly_wait() -> None:
    assert not found(run_of(1, node(1.5, children=8), workers=8))


def test_nobody_counted() -> None:
    assert CpuOversubscribed().unobserved(make_run({0: steps(3)}))
