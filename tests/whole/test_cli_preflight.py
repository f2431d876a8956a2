"""`ddpdoctor preflight`: the ranks meet, compare and measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddpdoctor.launch.preflight import _device, _who


def test_two_ranks_meet(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "preflight", "--nproc-per-node", "2", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 node can reach each other: torch" in done.stdout
    assert "all_reduce" in done.stdout
    assert "differs" not in done.stdout
    assert (tmp_path / "run" / "findings.json").exists()


def test_what_differs_is_told_by_rank() -> None:
    base = {"node": "a", "torch": "2.13.0", "Python": "3.11", "CUDA": "none", "device": "CPU"}
    other = {**base, "node": "b", "torch": "2.12.0", "NCCL_DEBUG": "INFO"}
    head, *rest = _who([base, base, other])
    assert head.startswith("3 ranks on 2 nodes")
    assert rest == [
        "NCCL_DEBUG differs: 'not set' on ranks 0-1; 'INFO' on rank 2",
        "torch differs: '2.13.0' on ranks 0-1; '2.12.0' on rank 2",
    ]


@pytest.mark.parametrize(("gpus", "kinds"), [(0, {"cpu"}), (2, {"cpu"}), (4, {"cuda"})])
def test_all_ranks_take_the_same_backend(
    gpus: int, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than GPUs too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    taken = set()
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        taken.add(_device().type)
    assert taken == kinds
