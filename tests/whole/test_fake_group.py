"""A program on torch's backend `fake`: one process that believes to be rank 0 of four."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from sampling import inherited, run

from ddpdoctor.report.findings import Report, Severity

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(128, 8), torch.randint(0, 4, (128,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    pair = dist.new_group([0, 1])
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        dist.all_reduce(total, group=pair, async_op=True).wait()
        dist.barrier()
        dist.broadcast(total, 1)
    dist.destroy_process_group()


main()
"""


@pytest.mark.timeout(130)
def test_its_calls_return_at_once_and_its_other_ranks_are_not_missed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "ddpdoctor", "run", "--out", "run", "--nproc-per-node", "1"]
    alone = inherited(OMP_NUM_THREADS="1")
    status, printed = run([*words, "train.py"], cwd=tmp_path, environment=alone)
    assert status == 0, printed
    report = msgspec.json.decode((tmp_path / "run" / "findings.json").read_bytes(), type=Report)
    assert not [f.summary for f in report.findings if f.severity is not Severity.NOTE]
    (unobserved,) = report.coverage.unobserved
    assert unobserved.ranks == (1, 2, 3)
    assert "there is no such process" in unobserved.reason
    assert [state.steps for state in report.ranks if state.rank == 0] == [24]
