"""DDP705 over literal events."""

from __future__ import annotations

from ddpdoctor.checks.performance.slow_backend import SlowBackend
from recordings import make_run, site, torch_loaded

from ddpdoctor.events import DeviceUsed, Event, GroupReady, Wrapped
from ddpdoctor.report.findings import Finding


def rank(
    backend: str = "gloo", device: str = "cuda:0", nccl: str = "2.27.3", uuid: str = "a"
) -> list[Event]:
    return [
        site(1, "train.py", 5, "dist.init_process_group('gloo')"),
        torch_loaded(nccl=nccl),
        GroupReady(at=0, group=0, name="0", backend=backend, ranks=(0, 1), member=True, site=1),
        Wrapped(
            at=0,
            model=0,
            wrapper="DistributedDataParallel",
            kind="Net",
            group=0,
            site=-1,
            device=device,
        ),
        DeviceUsed(at=0, index=0, uuid=uuid, name="H200", site=-1),
    ]


def found(*ranks: list[Event]) -> list[Finding]:
    return list(SlowBackend().examine(make_run(dict(enumerate(ranks)))))


def test_gloo_between_gpus() -> None:
    (finding,) = found(rank(uuid="a"), rank(uuid="b"))
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 5


def test_on_the_cpu() -> None:
    assert not found(rank(device="cpu"), rank(device="cpu"))


def test_nccl_or_both() -> None:
    assert not found(rank("nccl", uuid="a"), rank("nccl", uuid="b"))
    assert not found(rank("cpu:gloo,cuda:nccl", uuid="a"), rank("cpu:gloo,cuda:nccl", uuid="b"))


def test_ranks_share_a_gpu() -> None:
    assert not found(rank(uuid="a"), rank(uuid="a"))


def test_torch_without_nccl() -> None:
    assert not found(rank(nccl="", uuid="a"), rank(nccl="", uuid="b"))


def test_no_wrapped_model() -> None:
    assert SlowBackend().unobserved(make_run({0: []}))


def test_torch_chooses_one_backend_only() -> None:
    """Since torch 2.6 `init_process_group()` makes no group for the CPU where there are GPUs."""
    advice = (SlowBackend.__doc__ or "").partition("## How to fix it")[2].partition("##")[0]
    assert '`init_process_group("cpu:gloo,cuda:nccl")`' in advice
    assert "Without a backend torch takes that of the GPU only" in " ".join(advice.split())
