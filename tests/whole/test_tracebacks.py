"""What a person reads of an error or a warning is the same with and without the doctor."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import inherited

PROGRAM = """
import os
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

meeting = f"file://{os.getcwd()}/meeting-{os.urandom(4).hex()}"
dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x is None:
            raise Frozen("no input")
        return self.layer(x)


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise TypeError("frozen")


class Torn(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("no such item")
        return index


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for wrong in (
    lambda: dist.all_reduce("x"),
    lambda: dist.all_reduce(),
    lambda: dist.all_gather_object(None, 1),
    lambda: dist.broadcast(torch.ones(1), src=5),
    lambda: dist.new_group([7]),
    lambda: dist.init_process_group("gloo"),
    lambda: model(None),
    lambda: model(torch.ones(3, 5)),
    lambda: Backwards.apply(model(torch.ones(2, 4))).sum().backward(),
    lambda: model.load_state_dict({}),
    lambda: optimizer.load_state_dict({}),
    lambda: optimizer.step(closure=lambda: 1 / 0),
    lambda: DistributedDataParallel("x"),
    lambda: DistributedDataParallel(nn.ReLU()),
    lambda: DistributedSampler(Torn(), rank=4),
    lambda: list(DataLoader(Torn())),
    lambda: list(DataLoader(Torn(), num_workers=1)),
    lambda: torch.load("/nowhere"),
    lambda: nn.Linear("a", 2),
):
    try:
        wrong()
    except BaseException:
        traceback.print_exc()

warnings.simplefilter("always")
dist.all_reduce_coalesced([torch.ones(1)])
torch.optim.lr_scheduler.StepLR(optimizer, 1).step(3)
nn.utils.clip_grad_norm(model.parameters(), 1)
dist.destroy_process_group()
raise SystemError("the end")
"""


def read(printed: str) -> list[str]:
    """What was printed, without the frames inside of torch: it takes other ways when watched."""
    kept, torch_s = [], False
    for line in printed.splitlines():
        if line.startswith('  File "'):
            torch_s = "/site-packages/torch/" in line
        elif not line.startswith("    "):
            torch_s = False
        if not torch_s:
            kept.append(re.sub(r"0x[0-9a-f]+|meeting-\w+|rank=0 pid=\d+", "", line))
    return kept


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="wrappers stay in tracebacks")
def test_errors_and_warnings_read_as_if_alone(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(PROGRAM)
    alone = [sys.executable, str(script)]
    doctor = [sys.executable, "-m", "ddpdoctor", "exec", "--quiet", "--debug-level", "off"]
    watched = [*doctor, "--out", str(tmp_path / "run"), "--", *alone]
    told = []
    for command in (alone, watched):
        done = subprocess.run(
            command, cwd=tmp_path, env=inherited(), capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 1, done.stderr[-3000:]
        told.append(done.stderr)
    assert "in backward" in told[0] and told[0].count("Warning: ") >= 3
    assert "ddpdoctor/probe" not in told[1]
    ours = told[1].index("SystemError: the end\n") + len("SystemError: the end\n")
    assert read(told[1][:ours]) == read(told[0])
    # What torch refused itself was not missed.
    assert "probe-trouble" not in (tmp_path / "run" / "rank-0.jsonl").read_text()
