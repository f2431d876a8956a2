"""DDP206 over literal events: workers of a DataLoader that copy what they shared."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ddpdoctor.checks.memory.memory_growth import MemoryGrowth
from recordings import PID, START, make_run, monitor, site, started, steps

from ddpdoctor.events import ChildMemory, LoaderSeen, Payload, RankSample
from ddpdoctor.monitor import system
from ddpdoctor.report.findings import Finding

MB = 1 << 20


def worker(second: float, **sizes: tuple[int, int]) -> RankSample:
    """Resident and private megabytes of workers, by `w<number>`."""
    forked = tuple(
        ChildMemory(pid=int(name[1:]), rss_bytes=rss * MB, private_bytes=own * MB)
        for name, (rss, own) in sizes.items()
    )
    return RankSample(at=START + second, rank=0, pid=PID, rss_bytes=1, forked=forked)


def found(*samples: RankSample, workers: int = 2) -> list[Finding]:
    rows = Payload(name="rows", kind="other", length=2_500_000, order=0)
    loader = LoaderSeen(at=START, loader=0, site=1, loop_site=1, dataset="Log", length=9,
                        sampler="RandomSampler", workers=workers, payloads=(rows,))  # fmt: skip
    line = site(1, "train.py", 12, "loader = DataLoader(log, num_workers=2)")
    events = {0: [started(0, 1), line, loader, *steps(3)]}
    run = make_run(events, nodes={0: [monitor(), *samples]})
    return list(MemoryGrowth().examine(run))


def test_pages_that_become_private() -> None:
    first = worker(1, w7=(900, 10), w8=(900, 10))
    (finding,) = found(first, worker(9, w7=(905, 460), w8=(904, 440)))
    assert finding.rule == "workers-copy"
    assert finding.location is not None and finding.location.line == 12
    assert "from 10 MB to 460 MB in 8 s" in finding.summary
    assert "`rows` of Log, 2,500,000 entries" in finding.cause


def test_new_memory_of_workers_is_no_copy() -> None:
    first = worker(1, w7=(900, 10), w8=(900, 10))
    assert not found(first, worker(9, w7=(1350, 460), w8=(1340, 440)))


def test_of_a_single_worker_it_may_be_what_its_rank_overwrote() -> None:
    assert not found(worker(1, w7=(900, 10)), worker(9, w7=(900, 460)))


def test_workers_of_two_epochs_are_two_single_workers() -> None:
    assert not found(
        worker(1, w7=(900, 10)),
        worker(9, w7=(900, 460)),
        worker(11, w8=(900, 10)),
        worker(19, w8=(900, 460)),
    )


def test_what_python_itself_copies_is_little() -> None:
    first = worker(1, w7=(900, 10), w8=(900, 10))
    assert not found(first, worker(9, w7=(900, 90), w8=(900, 90)))


def test_children_of_a_rank_without_workers_are_not_judged() -> None:
    first = worker(1, w7=(900, 10), w8=(900, 10))
    assert not found(first, worker(9, w7=(905, 460), w8=(904, 440)), workers=0)


def test_what_a_forked_process_shares_is_told_by_the_kernel() -> None:
    code = (
        "import os, sys, time\n"
        "rows = bytearray(b'x') * 60_000_000\n"
        "if not os.fork():\n"
        "    print(os.getpid(), flush=True); sys.stdin.readline()\n"
        "    for n in range(0, len(rows), 4096): rows[n] = 121\n"
        "    print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        child = int(process.stdout.readline())
        before = system.private_memory(child)
        assert before is not None and before[0] > 60_000_000 > 6 * before[1]
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        deadline = time.monotonic() + 10
        while (after := system.private_memory(child)) is None or after[1] < 60_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert after[0] - before[0] < 20_000_000
    finally:
        os.killpg(process.pid, 9)
        process.wait(10)


def test_a_process_that_is_gone_has_no_memory() -> None:
    assert system.private_memory(1 << 30) is None
