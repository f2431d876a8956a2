"""What users do with their objects works as if the doctor were not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sampling import inherited

import ddpdoctor

PROGRAM = """
import copy
import inspect
import io
import multiprocessing.util
import os
import pickle
import sys
import typing
import weakref

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PLACE = os.environ["PLACE"]


class MyDDP(DistributedDataParallel):
    def forward(self, *inputs):
        return super().forward(*inputs) * 2


class MySampler(DistributedSampler):
    pass


class MyLoader(DataLoader):
    pass


def saved(x: torch.Tensor):
    torch.save(x, "saved.pt")


def slope(x: torch.Tensor):
    return torch.autograd.grad([(2 * x).sum()], [x])


def start():
    meeting = f"file://{PLACE}/meeting-{os.urandom(4).hex()}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()


start()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
ddp = MyDDP(net)
assert type(ddp) is MyDDP and isinstance(ddp, DistributedDataParallel)
ddp.register_comm_hook(None, fp16_compress_hook)  # the one slot that DDP has is the user's
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
step(ddp, optimizer)

before_step = []
handle = optimizer.register_step_pre_hook(lambda *_: before_step.append(1))
step(ddp, optimizer)
assert before_step == [1] and list(optimizer._optimizer_step_pre_hooks) == [handle.id]
handle.remove()

for module in (net, ddp.module):
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert not module._backward_hooks and "forward" not in vars(module)
    assert set(vars(module)) == set(vars(nn.Sequential()))
for parameter in net.parameters():
    assert not parameter._backward_hooks and not vars(parameter)

twin = copy.deepcopy(net)
again = pickle.loads(pickle.dumps(net))
buffer = io.BytesIO()
torch.save(net, buffer)
buffer.seek(0)
loaded = torch.load(buffer, weights_only=False)
for other in (twin, again, loaded):
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters()))
pickle.loads(pickle.dumps(optimizer.state_dict()))
copy.deepcopy(optimizer)

scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
assert scripted(torch.ones(1, 4)).shape == (1, 4)
traced = torch.jit.trace(twin, torch.ones(1, 4))
assert torch.equal(traced(torch.ones(1, 4)), twin(torch.ones(1, 4)))
torch.jit.script(saved)(torch.ones(1))
assert torch.jit.script(slope)(torch.ones(2, requires_grad=True))[0].tolist() == [2, 2]
wrapped = DistributedDataParallel(scripted)
wrapped(torch.ones(2, 4)).sum().backward()

data = TensorDataset(torch.arange(8.0))
sampler = MySampler(data, shuffle=False)
loader = MyLoader(data, sampler=sampler, batch_size=2, num_workers=1)
assert type(loader) is MyLoader and type(loader.sampler) is MySampler
assert [b[0].tolist() for b in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
pickle.loads(pickle.dumps(sampler))

child = os.fork()
if child == 0:
    small = nn.Linear(2, 2)
    small(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(small.parameters(), lr=0.1).step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0


class Lookups(dist.Store):
    pass


class Group(dist.ProcessGroup):
    def allgather(self, gathered, given, options):
        for tensors, tensor in zip(gathered, given):
            tensors[0].copy_(tensor)
        return Done()

    def broadcast(self, *arguments):
        return Done()


class Done(dist.Work):
    def wait(self, *timeout):
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future


for call in (lambda s: s.get("key"), lambda s: s.wait(["key"]), lambda s: s.multi_get(["key"])):
    for store in (Lookups(), dist.PrefixStore("p", Lookups())):
        try:
            call(store)
        except RuntimeError as error:
            assert not isinstance(error, RecursionError), error
        else:
            raise AssertionError
DistributedDataParallel(nn.Linear(4, 4), process_group=Group(0, 1))

for function in (
    sys.exit, os._exit, dist.init_process_group, device_mesh.new_group, dist.all_reduce, torch.save,
    nn.Module.__init__, multiprocessing.util._exit_function,
):
    assert pickle.loads(pickle.dumps(function)) is function
assert device_mesh.new_group is dist.new_group
assert dist.get_process_group_ranks(dist.new_group(rank for rank in (0,))) == [0]
assert nn.Module.__init__.__module__ == "torch.nn.modules.module"
assert str(inspect.signature(sys.exit)) == "(status=None, /)"
assert inspect.getfullargspec(torch.optim.lr_scheduler.StepLR.step).args == ["self", "epoch"]
assert inspect.getfullargspec(dist.destroy_process_group).args == ["group"]
assert typing.get_type_hints(torch.set_num_threads) == {}

for net in (nn.Linear(2, 2), nn.Linear(2, 2)):  # an optimizer takes steps, and its tensors change
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    del optimizer
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.utils.swap_tensors(net.weight, nn.Parameter(torch.zeros(2, 2)))
    held = weakref.ref(net.bias)
    try:
        torch.utils.swap_tensors(net.bias, nn.Parameter(torch.zeros(2)))
    except RuntimeError as error:
        assert "weakref" in str(error), error
    else:
        raise AssertionError

import gc
gone = weakref.ref(ddp), weakref.ref(optimizer), weakref.ref(loader)
del ddp, optimizer, loader, module, wrapped, parameter
gc.collect()
assert [r() for r in gone] == [None, None, None], "the doctor keeps an object alive"

for _ in range(2):  # groups that come and go
    dist.destroy_process_group()
    start()
    model = DistributedDataParallel(nn.Linear(4, 4))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.all_reduce(torch.ones(2))
    del model
dist.destroy_process_group()
print("as if alone", "ddpdoctor.probe" in sys.modules, flush=True)
sys.exit(False)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("watched", [False, True])
def test_objects_behave(watched: bool, tmp_path: Path) -> None:
    script = tmp_path / "objects.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script)]
    if watched:
        doctor = [sys.executable, "-m", "ddpdoctor", "exec", "--quiet", "--out", "run", "--"]
        command = doctor + command
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=inherited(PLACE=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert f"as if alone {watched}" in done.stdout, done.stderr[-3000:]
    if watched:
        text = (tmp_path / "run" / "rank-0.jsonl").read_text()
        assert "probe-trouble" not in text, text
        assert '"name":"default_hooks.fp16_compress_hook"' in text
        assert ddpdoctor.load(tmp_path / "run").to_dict()["run"]["outcome"] == "completed"


def test_modes_of_the_users_do_not_see_what_hooks_do(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from ddpdoctor.probe.recording.recorder import Recorder, guarded, set_recorder, shielded
    from ddpdoctor.storage.run_folder import EventWriter

    seen: list[str] = []

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append("function")
            return call(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append("dispatch")
            return call(*args, **(kwargs or {}))

    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    set_recorder(recorder)
    try:
        given = torch.ones(3)
        with torch.device("meta"), Functions(), Dispatches():
            made = guarded("test", lambda _: torch.zeros(3) + given.sum())
            shielded("test", lambda: given.add_(1))()
            assert not seen
            torch.ones(3)
            assert set(seen) == {"function", "dispatch"}, "and they see what the program does"
        assert made is not None and made.device.type == "cpu"
        assert given.tolist() == [2, 2, 2]
        with pytest.raises(ValueError, match="no"), Dispatches():
            shielded("test", lambda: 1 / 0)()
            seen.clear()
            torch.ones(3)
            assert seen == ["dispatch"]
            raise ValueError("no")
    finally:
        set_recorder(None)
