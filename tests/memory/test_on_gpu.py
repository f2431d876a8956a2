"""What only a real GPU can show: identities, contexts, the allocator's and NVML's figures."""

from __future__ import annotations

import os
import time

import pytest

from ddpdoctor.launch.devices import visible_gpus
from ddpdoctor.monitor import system

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="needs an NVIDIA GPU"),
]


def test_nvml_and_torch_speak_of_the_same_device() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.analysis.process.devices import plain

    gpus = system.Gpus()
    names = {plain(uuid) for uuid in gpus.uuids}
    assert plain(str(torch.cuda.get_device_properties(0).uuid)) in names
    assert gpus.driver and len(gpus.memory) == len(gpus.names)
    gpus.close()


def test_nvml_lists_this_process() -> None:
    torch = pytest.importorskip("torch")
    kept = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    gpus = system.Gpus()
    held = gpus.by_process()
    gpus.close()
    if not held:
        pytest.skip("NVML lists no process here (another container, or no permission)")
    if os.getpid() not in held:
        pytest.skip("NVML numbers processes as the host does")
    most = max(held[os.getpid()].values())
    assert most == 0 or most >= len(kept)  # 0: there, but its size is not told


def test_a_context_is_found_where_it_is() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording.torch_compat import has_context

    torch.ones(1, device="cuda:0")
    assert has_context(0)


def test_flags_are_read_later_without_waiting() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording.devices import Flags

    bad = torch.full((4,), float("nan"), device="cuda")
    numbers = [torch.linalg.vector_norm(t, ord=float("inf")) for t in (bad, torch.ones_like(bad))]
    flags = Flags(numbers)
    deadline = time.monotonic() + 10
    while (answers := flags.answers()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answers == [True, False]


def test_growth_on_the_device_is_what_the_allocator_says() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording.devices import memory

    before = memory()[0]
    kept = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
    assert memory()[0] - before >= len(kept)
