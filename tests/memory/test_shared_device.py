"""DDP203 over literal events."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.memory.shared_device import SharedDevice
from ddpdoctor.checks.memory.stray_cuda_context import StrayCudaContext
from gpus import gpu_run, uses
from recordings import make_run

from ddpdoctor.events import Event, ExceptionRaised, GroupReady
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Severity


def group(backend: str) -> Event:
    return GroupReady(at=0, group=0, name="0", backend=backend, ranks=(0, 1), member=True, site=1)


def test_two_ranks_on_one_gpu() -> None:
    run = gpu_run([[uses(0, "aaaa"), group("nccl")], [uses(0, "aaaa"), group("nccl")]])
    (finding,) = SharedDevice().examine(run)
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 12


def test_fewer_gpus_than_ranks_with_gloo() -> None:
    run = gpu_run([[uses(0, "aaaa"), group("gloo")], [uses(0, "aaaa"), group("gloo")]], gpus=1)
    assert [f.severity for f in SharedDevice().examine(run)] == [Severity.NOTE]


def test_gloo_with_enough_gpus_is_still_wrong() -> None:
    run = gpu_run([[uses(0, "aaaa"), group("gloo")], [uses(0, "aaaa"), group("gloo")]])
    assert [f.severity for f in SharedDevice().examine(run)] == [Severity.ERROR]


def test_cuda_0_of_ones_own() -> None:
    assert not list(SharedDevice().examine(gpu_run([[uses(0, "aaaa")], [uses(0, "bbbb")]])))


def test_told_to_use_another_but_trains_elsewhere() -> None:
    run = gpu_run([[uses(0, "aaaa")], [uses(0, "aaaa", "set_device"), uses(1, "bbbb")]])
    assert not list(SharedDevice().examine(run))


def test_devices_without_identity() -> None:
    assert not list(SharedDevice().examine(gpu_run([[uses(0, "")], [uses(0, "")]])))


def test_no_gpu() -> None:
    assert SharedDevice().unobserved(make_run({0: []})) == "no rank used a GPU"


def test_nccl_refuses_it_in_the_constructor() -> None:
    said = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4f000"
    error = ExceptionRaised(at=0, kind="torch.distributed.DistBackendError", message=said)
    ranks = [[uses(0, "aaaa"), group("nccl"), error] for _ in range(2)]
    run = gpu_run(ranks, ended={0: 1, 1: 1})
    (finding,) = diagnose(run, [SharedDevice(), FirstFailure()]).findings
    assert finding.check == "shared-device"
    assert [c.check for c in finding.consequences] == ["first-failure"]


@pytest.mark.parametrize("uuids", [("MIG-1", "MIG-2"), ("aaaa", "aaaa")], ids=["parts", "whole"])
def test_parts_of_one_gpu(uuids: tuple[str, str]) -> None:
    """Whether torch names the part or the whole GPU, as NVML does, each rank has its own part."""
    ranks = [[uses(0, uuid)] for uuid in uuids]
    assert not list(SharedDevice().examine(gpu_run(ranks, divided=("GPU-aaaa",))))
    assert not list(StrayCudaContext().examine(gpu_run(ranks, divided=("GPU-aaaa",))))


@pytest.mark.parametrize(
    ("backend", "severity"),
    [("nccl", Severity.ERROR), ("cpu:gloo,cuda:nccl", Severity.ERROR), ("gloo", Severity.NOTE)],
)
def test_no_rank_is_sent_to_a_gpu_that_is_not_there(backend: str, severity: Severity) -> None:
    run = gpu_run([[uses(0, "aaaa"), group(backend)], [uses(0, "aaaa"), group(backend)]], gpus=1)
    (finding,) = SharedDevice().examine(run)
    assert finding.severity is severity
    assert finding.cause == "the node has 1 GPU for 2 ranks"
    assert finding.fix == "start one rank per GPU: `--nproc-per-node 1`"
