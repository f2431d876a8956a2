"""DDP204 over literal events."""

from __future__ import annotations

from ddpdoctor.checks.memory.stray_cuda_context import StrayCudaContext
from gpus import GB, gpu_run, held, uses
from recordings import make_run, monitor

from ddpdoctor.events import DeviceTouched, Event

OWN: list[list[Event]] = [[uses(0, "aaaa")], [uses(1, "bbbb")]]


def touched(by: str = "torch.load") -> Event:
    return DeviceTouched(at=0, index=0, uuid="aaaa", site=1, by=by)


def test_memory_on_somebody_elses_gpu() -> None:
    seen = [
        held(r, n, **g)
        for n in range(3)
        for r, g in ((0, {"g0": 4 * GB}), (1, {"g0": GB // 2, "g1": 4 * GB}))
    ]
    run = gpu_run([OWN[0], [*OWN[1], touched()]], *seen)
    (finding,) = StrayCudaContext().examine(run)
    assert finding.ranks == (1,)
    assert finding.subjects == ("GPU 0",)
    assert finding.location is not None and finding.location.line == 12


def test_everybody_at_home() -> None:
    seen = [held(r, n, **{f"g{r}": GB}) for n in range(3) for r in range(2)]
    assert not list(StrayCudaContext().examine(gpu_run(OWN, *seen)))


def test_told_to_use_it() -> None:
    own = [OWN[0], [*OWN[1], uses(0, "aaaa", "set_device")]]
    seen = [held(1, n, g0=GB, g1=GB) for n in range(3)]
    assert not list(StrayCudaContext().examine(gpu_run(own, *seen)))


def test_seen_only_once() -> None:
    seen = [held(1, 1, g0=GB, g1=GB), held(1, 2, g1=GB)]
    assert not list(StrayCudaContext().examine(gpu_run(OWN, *seen)))


def test_nvml_speaks_of_other_devices() -> None:
    own: list[list[Event]] = [[uses(0, "mig-1")], [uses(0, "mig-2")]]
    seen = [held(r, n, g0=GB) for n in range(3) for r in range(2)]
    assert not list(StrayCudaContext().examine(gpu_run(own, *seen)))


def test_why_nothing_is_said() -> None:
    assert "NVML lists none" in str(StrayCudaContext().unobserved(gpu_run(OWN)))
    broken = monitor(gpu_trouble="NVML does not answer: driver too old")
    run = make_run({0: []}, nodes={0: [broken]})
    assert "too old" in str(StrayCudaContext().unobserved(run))
