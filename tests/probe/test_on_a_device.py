"""What the probe does to a device: nothing is read at once, and little is launched.

Fake tensors say that they are on a GPU, have no values, and raise where one is read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddpdoctor.events import Averaged
from ddpdoctor.probe.recording import devices
from ddpdoctor.probe.recording.devices import Failed, Work, hands_off, largest_later
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.recording.sampling import Cost
from ddpdoctor.probe.tensors import device_sketches, digests, pending_digests
from ddpdoctor.probe.tensors.device_sketches import LaterSketch
from ddpdoctor.probe.tensors.digests import BINS, Sketcher, Unsuited, word_sum
from ddpdoctor.probe.tensors.pending_digests import SomeValues, Waiting
from ddpdoctor.probe.training.finite_gradients import finite
from ddpdoctor.probe.watchers.gradients import hyperparameters
from ddpdoctor.probe.watchers.gradients.zero_gradients import readable
from ddpdoctor.probe.watchers.graph.devices_used import DevicesUsed
from ddpdoctor.probe.watchers.manual_sync.averaged_gradients import AveragedGradients
from ddpdoctor.probe.watchers.numerics.numerics import Numerics
from ddpdoctor.probe.watchers.process.no_process_group import _values
from ddpdoctor.storage.run_folder import EventWriter


class Copies:
    """Stands for the copies to the host; what they hold is told by `come`."""

    made: list[Copies] = []
    come: list[float] | None = None

    def __init__(self, values: Any) -> None:
        self.device, self.host = values.device, SimpleNamespace(tolist=lambda: self.come)
        Copies.made.append(self)

    def arrived(self, *, wait: bool = False) -> bool:
        return self.come is not None


class Launches(TorchDispatchMode):
    """Counts operations that are kernels, and the bytes of the largest temporary."""

    VIEWS = ("view", "reshape", "detach", "alias", "slice", "split", "as_strided", "select",
             "unsqueeze", "empty", "permute", "t", "device", "narrow")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name.lstrip("_").removesuffix("_copy") not in self.VIEWS:
            self.kernels[name] += 1
        if name == "sum" and (kwargs or {}).get("dtype") not in (None, args[0].dtype):
            self.largest = max(self.largest, args[0].numel() * 8)  # converted as a whole
        return result


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    for module in (devices, pending_digests):
        monkeypatch.setattr(module, "HostCopy", Copies)
    monkeypatch.setattr(digests, "check_suited", lambda tensor: None)  # it refuses fake tensors
    monkeypatch.setattr(Copies, "made", [])
    monkeypatch.setattr(Copies, "come", None)
    with FakeTensorMode() as mode:
        yield mode


def test_fake_tensors_raise_where_they_are_read(on_gpu: FakeTensorMode) -> None:
    with pytest.raises(Exception, match="local_scalar_dense"):
        torch.ones(2, device="cuda").sum().item()


def test_nothing_is_read_at_once(on_gpu: FakeTensorMode) -> None:
    weight = torch.ones(300, 64, device="cuda", requires_grad=True)
    gaps = torch.empty_strided((64, 33), (1, 128), device="cuda", dtype=torch.bfloat16)
    for tensor in (weight, gaps):
        found, _ = digests.sums([tensor, None])
        assert found[0].device.type == "cuda"
        assert not Waiting(found).ready()
        assert digests.digests([tensor]) == [digests.ABSENT]
        assert digests.some_values([tensor]) == []
        assert finite(tensor)
        assert not readable(tensor)
        assert _values(tensor) == []
    assert largest_later(weight) is not None
    assert hyperparameters._plain(torch.ones((), device="cuda")) is None


def test_some_values_come_later(on_gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one kernel and one copy for all tensors."""
    tensors = [torch.ones(300, 64, device="cuda"), None, torch.ones(2, device="cuda")]
    with Launches() as launches:
        found = SomeValues(tensors)
    assert not found.ready() and found.values == []
    assert (dict(launches.kernels), len(Copies.made)) == ({"cat": 1}, 1)
    monkeypatch.setattr(Copies, "come", [1.0, 2.0, 3.0])
    assert found.ready() and found.values == [1.0, 2.0, 3.0]


def test_averages_are_recorded_once_their_values_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order; without values, as where a graph is captured, there is nothing to tell."""
    told: list[Any] = []
    recorder: Any = SimpleNamespace(emit=told.append)
    AveragedGradients.renew()
    watcher = AveragedGradients.current

    def event(step: int, kind: str = "gradients") -> Averaged:
        return Averaged(at=0, optimizer=0, step=step, local=(), applied=(), kind=kind)

    def values(come: list[float], there: bool = True) -> Any:
        return SimpleNamespace(values=come, ready=lambda wait=False: there or wait)

    none = values([])
    watcher.pending = [
        (event(1), values([]), values([]), none),
        (event(2), values([1.0]), values([math.nan]), none),
        (event(3, "parameters"), values([1.0]), values([1.0]), none),
        (event(4, "parameters"), values([1.0]), values([3.0]), none),
        (event(5), values([1.0]), values([2.0], there=False), none),
        (event(6), values([1.0]), values([4.0]), none),
    ]
    watcher._record_arrived(recorder)
    assert [(e.step, e.local, e.applied) for e in told] == [(4, (1.0,), (3.0,))]
    assert watcher.looks == {0: 1}
    watcher._leaving(recorder, None)
    assert [e.step for e in told] == [4, 5, 6]


def test_a_sketch_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor)
    monkeypatch.setattr(digests, "check_suited", lambda tensor: None)
    sketcher = Sketcher()
    for _ in range(2):
        assert sketcher.bins(torch.ones(300, 333, device="meta")).device.type == "meta"
    assert len(sketcher._elsewhere) == 1, "the signs are copied there once"


class Arrived:
    """A copy to the host that is there at once."""

    def __init__(self, values: Any) -> None:
        self.host = values

    def arrived(self, *, wait: bool = False) -> bool:
        return True


def test_sketches_of_a_device_tell_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pieces and blocks, of several tensors and types; as large as it is, within a third."""
    monkeypatch.setattr(device_sketches, "HostCopy", Arrived)
    signs = Sketcher().signs_on(torch.device("cpu"))
    torch.manual_seed(1)
    one = [torch.randn(1200, 1000), None, torch.randn(37, dtype=torch.float64), torch.ones(3).int()]
    other = [one[0] + 0.01 * torch.randn(1200, 1000), None, one[2], one[3]]
    first, second, again = (LaterSketch(tensors, signs) for tensors in (one, other, one))
    assert all(sketch.ready() for sketch in (first, second, again))
    assert first.bins == again.bins and len(first.bins) == BINS
    assert first.norm == pytest.approx(float(one[0].norm()), rel=1e-3)
    apart = sum((a - b) ** 2 for a, b in zip(first.bins, second.bins, strict=True)) ** 0.5
    assert apart == pytest.approx(float((one[0] - other[0]).norm()), rel=0.34)


def test_a_sketch_takes_few_kernels(
    on_gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sketches, "HostCopy", Copies)
    monkeypatch.setattr(device_sketches, "check_suited", lambda tensor: None)
    signs = torch.ones(device_sketches.BLOCK, device="cuda")
    model = [torch.ones(500, 1000, device="cuda") for _ in range(64)]  # 32 million elements
    with Launches() as launches:
        LaterSketch(model, signs)
    assert sum(launches.kernels.values()) <= 64 * 5 and len(Copies.made) == 1


def numerics(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    Numerics.renew()
    Numerics.current.plain = FakeTensor
    recorder: Any = SimpleNamespace(step=3, own_ns=0, every=0)
    recorder.emit = lambda event, vital=False: told.append(event)
    recorder.affordable = lambda: False
    monkeypatch.setattr(Numerics.current, "backwards", 10_000)
    return Numerics.current, recorder


def test_a_routine_step_costs_two_kernels_a_copy_and_an_event(
    on_gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    watcher, recorder = numerics(told, monkeypatch)
    parameter = torch.ones(1000, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    step: Any = SimpleNamespace(optimizer=lambda: optimizer, number=3)
    loss, gradient = torch.ones((), device="cuda"), torch.ones(1000, device="cuda")
    backward: Any = SimpleNamespace(roots=(loss,), site=1, number=7)
    with Launches() as launches:
        watcher._backward_begins(recorder, backward)
        watcher._look_at_gradient(recorder, backward, False, "weight", gradient)
        watcher._step_begins(recorder, step)
    assert dict(launches.kernels) == {"linalg_vector_norm": 1, "stack": 1}
    assert len(Copies.made) == 1
    monkeypatch.setattr(Copies, "come", [1.0, math.nan])
    watcher._step_begins(recorder, step)
    assert [(e.kind, e.step) for e in told] == [("gradient", 3)]


@pytest.mark.parametrize("kept", [True, False])
def test_the_loss_of_an_earlier_backward(
    on_gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """It counts where its gradients are still there when the step comes."""
    told: list[Any] = []
    watcher, recorder = numerics(told, monkeypatch)
    parameter = torch.ones(8, device="cuda", requires_grad=True)
    parameter.grad = torch.ones(8, device="cuda")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    step: Any = SimpleNamespace(optimizer=lambda: optimizer, number=3)
    for site in (1, 2):
        loss = torch.ones((), device="cuda")
        watcher._backward_begins(recorder, SimpleNamespace(roots=(loss,), site=site, number=site))
    watcher._step_begins(recorder, step)
    assert len(Copies.made) == 1
    monkeypatch.setattr(Copies, "come", [math.nan, math.inf if kept else 1.0, 1.0])
    watcher._step_begins(recorder, step)
    assert [e.site for e in told] == ([1] if kept else [])


def test_no_large_temporary() -> None:
    """A gradient of half precision in a bucket, behind an odd number of elements."""
    bucket = torch.empty(50_257 * 769, dtype=torch.bfloat16, device="meta")
    views = [
        bucket[50_257:].view(50_257, 768),
        bucket[50_257:].view(50_257, 768)[:, ::2],
        bucket[: 50_256 * 768].view(50_256, 768).t(),
    ]
    for view in views:
        with Launches() as launches:
            word_sum(view)
        assert launches.largest <= 16 << 20
    with pytest.raises(Unsuited):
        word_sum(torch.empty((1 << 27) + 1, dtype=torch.bfloat16, device="meta")[1:])


def test_a_sum_in_pieces_is_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-9, 9, (7, 3000), dtype=torch.int16)[:, 1:]
    whole = int(word_sum(values))
    monkeypatch.setattr(digests, "PIECE", 100)
    assert int(word_sum(values)) == whole == int(values.sum())


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(Failed, "seen", False)
    return Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})


def events(recorder: Recorder, kind: str) -> list[dict[str, Any]]:
    lines = (recorder.directory / "rank-0.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def test_after_an_error_of_a_device_it_is_left_alone(
    recorder: Recorder, on_gpu: FakeTensorMode
) -> None:
    """A launch raises what an earlier kernel of the program's did."""
    recorder.trouble("numerics", RuntimeError("shapes differ"))
    assert not hands_off()
    recorder.trouble("drift", RuntimeError("CUDA error: an illegal memory access"), "drift")
    assert hands_off()
    assert digests.sums([torch.ones(2, device="cuda")])[0] == [None]
    assert "the program launched before" in events(recorder, "probe-trouble")[-1]["error"]


@pytest.mark.parametrize(("kind", "readable"), [("cuda", True), ("meta", False), ("hpu", False)])
def test_what_is_not_read_on_a_device_is_named(
    recorder: Recorder, kind: str, readable: bool
) -> None:
    parameter: Any = SimpleNamespace(device=torch.device(kind))
    DevicesUsed()._name_unread(recorder, [parameter])
    told = events(recorder, "not-observed")
    whole = {e["check"] for e in told if not e.get("partly")}
    if kind == "meta":
        assert told == []
        return
    assert "zero-gradient" in whole
    assert ("parameter-drift" in whole) is not readable
    assert {e["check"] for e in told if e.get("partly")} >= {"double-averaging"}


def test_waiting_in_a_launch_is_not_the_doctors_time(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of a device that is behind is full: the program would have waited as well."""
    times = iter([0, 50_000_000, 0, 50_000_000])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(times))
    recorder.own_ns = 50_000_000
    assert Cost(recorder).ns(10) == 50_000_000
    cost = Cost(recorder)
    Work.add(10, 1_000_000)
    assert 200_000 < cost.ns(10) < 400_000
    assert recorder.own_ns < 400_000


def test_memory_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats(index: int) -> dict[str, Any]:
        count = {"all": {"current": 10 + index, "peak": 20 + index}}
        return {"allocated_bytes": count, "reserved_bytes": count} if index < 2 else {}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    assert devices.memory() == (21, 41, 21)
