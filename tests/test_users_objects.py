"""What users do with their objects works as if the doctor were not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sampling import inherited

PROGRAM = """
import copy
import io
import os
import pickle
import sys

import torch
import torch.distributed as dist
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

import gc, weakref
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


def test_modes_of_the_users_do_not_see_what_hooks_do(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from ddpdoctor.probe.recorder import Recorder, guarded, set_recorder, shielded
    from ddpdoctor.runfolder import EventWriter

    seen: list[str] = []

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append("function")
            return call(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append("dispatch")
            return call(*args, **(kwargs or {}))

    active = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    set_recorder(active)
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
