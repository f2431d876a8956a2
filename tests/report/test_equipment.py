"""The machine as a bug report would tell it."""

from __future__ import annotations

from recordings import make_run, monitor, started, torch_loaded

from ddpdoctor.events import MemoryLimit
from ddpdoctor.report.environment import describe

GB = 1 << 30


def test_what_is_the_same_is_said_once() -> None:
    node = monitor(
        cores=16, cpu_quota=4.0, memory_bytes=128 * GB, gpus=("NVIDIA H200",) * 2, driver="570.1"
    )
    limit = MemoryLimit(at=0, limit_bytes=64 * GB)
    environment = {"NCCL_ALGO": "Ring", "TORCH_FR_BUFFER_SIZE": "2000", "RANK": "0"}
    ranks = {
        r: [
            started(r, 2, environment={**environment, **({"OMP_NUM_THREADS": "8"} if r else {})}),
            torch_loaded(cuda="12.8", nccl="2.27.3"),
        ]
        for r in range(2)
    }
    run = make_run(ranks, nodes={0: [node, limit]}, platform="Linux-6.1")
    assert describe(run) == (
        "Python 3.11.4, torch 2.13.0, CUDA 12.8, NCCL 2.27.3, Linux-6.1",
        "host: 16 cores, of which 4 may be used, 128 GB of memory, limited to 64.0 GB, "
        "2 x NVIDIA H200, driver 570.1",
        "NCCL_ALGO=Ring, OMP_NUM_THREADS=8 (rank 1)",
    )


def test_versions_that_differ_are_all_said() -> None:
    run = make_run({0: [torch_loaded("2.13.0")], 1: [torch_loaded("2.12.1")]})
    assert describe(run)[0] == "Python 3.11.4, torch 2.13.0, torch 2.12.1"
