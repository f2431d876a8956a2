"""A backward that runs inside the forward of its wrapper: whether it communicated is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sampling import inherited, run

from ddpdoctor.events import Bypassed, SyncPattern, UnusedParameters
from ddpdoctor.launch.environment import PACKAGE
from ddpdoctor.run import load
from ddpdoctor.storage.run_folder import RunFolder

PROGRAM = """
import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for used, optimizer in zip((self.first, self.second), optimizers):
            optimizer.zero_grad()
            self.back(used(x).sum())
            optimizer.step()
        ddp.require_backward_grad_sync = False

    def back(self, loss):
        if prepared:
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([loss])
        with ddp.no_sync() if blocked else contextlib.nullcontext():
            loss.backward()


step = Step()
optimizers = [torch.optim.SGD(p.parameters(), lr=0.1) for p in (step.first, step.second)]
ddp = DDP(step, find_unused_parameters=True)
for _ in range(40):
    ddp.require_backward_grad_sync = True
    ddp(torch.ones(2, 4))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("prepared", "blocked", "reason"),
    [(True, False, ""), (False, False, "inside forward"), (False, True, "no_sync")],
)
def test_backwards_inside_a_forward(
    prepared: bool, blocked: bool, reason: str, tmp_path: Path
) -> None:
    """Two of them, as in a GAN; a framework may have DDP's reducer prepared for each, or block it
    for some."""
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(f"prepared, blocked = {prepared}, {blocked}\n{PROGRAM}")
    out.mkdir()
    environment = inherited(
        PYTHONPATH=str(PACKAGE / "shim"), DDPDOCTOR_DIR=str(out),
        DDPDOCTOR_HOME=str(PACKAGE.parent), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
    )  # fmt: skip
    status, printed = run([sys.executable, str(script)], cwd=tmp_path, environment=environment)
    assert status == 0, printed
    rank = load([RunFolder(out)]).ranks[0]
    patterns = rank.of(SyncPattern)
    assert {p.optimizer for p in patterns} == {0, 1}
    assert {p.reason for p in patterns} == {reason}
    assert not rank.of(Bypassed)
    told = rank.of(UnusedParameters)
    if prepared:
        assert "first" in (told[0].called or ())  # although that forward still runs
    assert rank.steps == 40
