"""Real runs: the folder alone says what happened when everything was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sampling import inherited

from ddpdoctor.events import ExceptionRaised
from ddpdoctor.report import registry
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.storage.run_folder import Lines

HANGS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for step in range(10):
    model(torch.ones(3)).sum().backward()
    if step == 0 and dist.get_rank() == 1:
        dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(130)
def test_killed_with_everything_the_folder_still_tells(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "ddpdoctor", "run", "--out", str(out), "--quiet",
               "--on-hang", "report", "--nproc-per-node", "2", "train.py"]  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, env=inherited(), start_new_session=True, stderr=subprocess.DEVNULL
    ) as doctor:
        _wait_for_the_verdict(out)
        for pid in (doctor.pid, *_pids(out)):
            os.kill(pid, signal.SIGKILL)
        doctor.wait()
    report = open_run([out]).report(registry.select(("hang",)))
    (finding,) = [f for f in report.findings if f.severity.value == "error"]
    assert finding.code == "DDP601"
    assert finding.location is not None
    assert finding.location.source.strip() == "dist.barrier()"
    assert finding.subjects == ("DDP forward", "barrier")  # in which DDP orders its buckets anew
    assert report.run.outcome == "hung"


def _wait_for_the_verdict(out: Path) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        node = out / "node-0.jsonl"
        if node.exists() and '"event":"stall"' in node.read_text():
            return
        time.sleep(0.25)
    raise AssertionError("no verdict in 90 s")


def _pids(out: Path) -> list[int]:
    return [
        json.loads(path.read_text().partition("\n")[0])["pid"]
        for path in sorted(out.glob("rank-*.jsonl"))
    ]


SWALLOWS = """
import logging, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")

def failing():
    dist.broadcast(torch.ones(1), src=5)

status = 0
try:
    if "--own" in sys.argv:
        raise ValueError("boom")
    failing()
except Exception:
    if "--says" in sys.argv:
        logging.exception("failed")
    if "--there" in sys.argv:
        sys.exit(3)
    status = 3
if "--goes-on" in sys.argv:
    dist.barrier()
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.timeout(130)
@pytest.mark.parametrize(
    ("options", "kind", "line"),
    [
        (("--there",), "RuntimeError", "dist.broadcast(torch.ones(1), src=5)"),
        (("--there", "--own"), "ValueError", 'raise ValueError("boom")'),
        ((), "RuntimeError", "dist.broadcast(torch.ones(1), src=5)"),
        (("--own",), "exit status 3", "sys.exit(status)"),
        (("--own", "--says"), "ValueError", 'raise ValueError("boom")'),
        (("--goes-on", "--says"), "exit status 3", "sys.exit(status)"),
    ],
)
def test_what_a_program_caught_before_it_left(
    tmp_path: Path, options: tuple[str, ...], kind: str, line: str
) -> None:
    (tmp_path / "train.py").write_text(SWALLOWS)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "ddpdoctor", "run", "--out", str(out), "--quiet",
               "--nproc-per-node", "1", "train.py", *options]  # fmt: skip
    ended = subprocess.run(
        command, cwd=tmp_path, env=inherited(), capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    report = open_run([out]).report(registry.select(("first-failure",)))
    (finding,) = report.findings
    assert finding.subjects == (kind,)
    assert finding.location is not None
    assert finding.location.source.strip() == line
    raised = [e for e in Lines(out / "rank-0.jsonl").events() if isinstance(e, ExceptionRaised)]
    if kind == "ValueError":
        assert raised[-1].frames[-1].inside[0].text == 'if "--own" in sys.argv:'
